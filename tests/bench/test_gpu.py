import pytest

from kvd.bench.gpu import Measured
from kvd.bench.report import gpu_row, gpu_table
from kvd.cli.main import main


@pytest.mark.parametrize("more", [("--busy", "2"), ("--within", "taskset --cpu-list 1"), ("--plot", "x.png")])
def test_a_measurement_on_a_gpu_refuses_flags_that_it_would_not_heed(capsys, more):
    assert main(["bench", "--device", "cuda:0", *more]) != 0
    assert "--device measures neither --busy nor --within" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:x", "0"])
def test_a_device_that_is_no_gpu_is_refused(capsys, device):
    with pytest.raises(SystemExit):
        main(["bench", "--device", device])
    assert f"{device!r}: must be cuda:N" in capsys.readouterr().err


def test_pulls_are_shown_as_shares_of_one_copy_of_all():
    row = gpu_row(Measured(block=4096, bytes=10**9, one_copy=0.5, adjacent=1.0, scattered=2.0))
    assert (row["adjacent, GB/s"], row["scattered, GB/s"]) == (1.0, 0.5)
    assert (row["adjacent, of one copy"], row["scattered, of one copy"]) == (0.5, 0.25)
    assert gpu_table([row]).row_count == 1
