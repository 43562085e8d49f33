"""VLLM knows the connector by its name, also as a part of MultiConnector."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.entrypoints.serve.utils.request_logger import RequestLogger

from kvd.engines.vllm import KvdConnector
from kvd.engines.vllm.plugin import register
from kvd.engines.vllm.stats import KvdStats
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.real
def test_vllm_finds_the_connector_by_its_name_alone() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvd")
    assert plugin.load() is register
    program = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "kvd.engines.vllm.connector" not in sys.modules
print(KVConnectorFactory.get_connector_class_by_name("KvdConnector").__name__)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.stdout.splitlines()[-1:] == ["KvdConnector"], ended.stderr


def test_registering_twice_is_no_error() -> None:
    register()
    register()


def test_what_multi_connector_received_of_this_one_becomes_its_statistics() -> None:
    sent = KvdStats().data | {"pull_seconds": [0.1], "pull_bytes": [4], "pull_blocks": [1]}
    received = MultiConnector.build_kv_connector_stats({KvdConnector.__name__: sent})
    assert received is not None
    stats = received["KvdConnector"]
    assert isinstance(stats, KvdStats)
    assert stats.data == sent


def test_vllms_request_log_shows_a_requests_parameters_without_the_ticket(caplog: pytest.LogCaptureFixture) -> None:
    register()
    caplog.set_level(logging.INFO, logger="vllm")
    logging.getLogger("vllm").addHandler(caplog.handler)
    params = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True, "kvd_ticket": "kvd1.secret"}})
    RequestLogger(max_log_len=None).log_inputs("r", None, None, None, params, None)
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "'do_remote_prefill': True, 'kvd_ticket': 'kvd1.(not shown)'" in caplog.text
    assert "secret" not in caplog.text
