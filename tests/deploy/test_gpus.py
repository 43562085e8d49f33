"""What the doctor says of GPUs."""

from unittest.mock import patch

from cuda.bindings import nvml

from kvd.cuda.device import device
from kvd.doctor import Level
from kvd.doctor.gpus import check_gpus
from kvd.errors import DeviceError, ErrorCode
from tests.support.gpu import over_standin


@over_standin()
def test_whether_host_memory_can_be_pinned_is_tried_and_said():
    [finding] = [finding for finding in check_gpus("cuda:0") if finding.subject == "GPU 0 pinned memory"]
    assert (finding.level, finding.text) == (Level.OK, "host memory can be pinned")
    refused = DeviceError(ErrorCode.OVERLOADED, "cuMemHostRegister: too much", "CUDA_ERROR_OUT_OF_MEMORY")
    with patch("kvd.doctor.gpus.pin", side_effect=refused):
        [finding] = [finding for finding in check_gpus("cuda:0") if finding.subject == "GPU 0 pinned memory"]
    assert (finding.level, finding.text) == (
        Level.SLOW,
        "host memory cannot be pinned: cuMemHostRegister: too much; it is copied twice",
    )
    assert "ulimit -l" in finding.fix


@over_standin(device_count=2)
def test_a_gpu_that_can_have_pools_is_shown_with_its_uuid_and_whether_network_cards_reach_it():
    findings = check_gpus("cuda:0")
    assert [finding.subject for finding in findings if "memory can be shared" in finding.text] == ["GPU 0", "GPU 1"]
    assert "GPU-" in findings[0].text
    assert "network cards reach it" in findings[0].text


@over_standin(gpu_direct_rdma=0)
def test_a_gpu_that_network_cards_do_not_reach_is_said_so():
    assert "network cards do not reach it" in check_gpus("cuda:0")[0].text


@over_standin()
def test_without_dma_buf_other_hosts_read_by_way_of_host_memory_and_why_is_said():
    [finding] = [finding for finding in check_gpus("cuda:0") if finding.subject == "GPU 0 network"]
    assert finding.level is Level.NOTE
    assert "by way of pinned host memory: the driver registers it with no network card" in finding.text


@over_standin(dma_buf=1)
def test_with_dma_buf_the_way_is_the_same_and_it_is_kvd_that_does_not_ask_for_more():
    [finding] = [finding for finding in check_gpus("cuda:0") if finding.subject == "GPU 0 network"]
    assert "by way of pinned host memory: the driver could register it" in finding.text


@over_standin(mps=1)
def test_a_gpu_that_cannot_have_pools_is_broken_only_for_a_daemon_that_wants_one():
    [wanted], [unwanted] = check_gpus("cuda:0"), check_gpus("cpu")
    assert (wanted.level, unwanted.level) == (Level.BROKEN, Level.NOTE)
    assert "MPS" in wanted.text


@over_standin(device_count=0)
def test_no_gpu_is_broken_only_for_a_daemon_that_wants_one():
    [wanted], [unwanted] = check_gpus("cuda:0"), check_gpus("cpu")
    assert (wanted.level, unwanted.level) == (Level.BROKEN, Level.NOTE)
    assert "CUDA_ERROR_NO_DEVICE" in wanted.text
    assert "none is needed" in unwanted.fix


@over_standin()
def test_a_persistence_mode_that_cannot_be_found_out_is_unknown_with_its_fix():
    unknown = check_gpus("cuda:0")[-1]
    assert (unknown.subject, unknown.level) == ("GPU 0 persistence", Level.NOTE)
    assert unknown.text.startswith("unknown: ")
    assert "nvidia-persistenced" in unknown.fix


@over_standin(mig=1)
def test_a_mig_instance_is_said_to_be_untried():
    assert any("MIG" in finding.text and finding.level is Level.NOTE for finding in check_gpus("cuda:0"))


@over_standin()
def test_a_gpu_that_forgets_its_memory_when_nobody_has_it_open_is_pointed_out():
    nvml.init_v2 = lambda: None
    nvml.device_get_handle_by_uuid = lambda uuid: uuid
    modes = {}
    nvml.device_get_persistence_mode = modes.get
    uuid = device(0).uuid
    for mode, level, word in ((0, Level.NOTE, "off: "), (1, Level.OK, "on: ")):
        modes[uuid] = mode
        finding = check_gpus("cuda:0")[-1]
        assert (finding.level, finding.text.startswith(word)) == (level, True)
