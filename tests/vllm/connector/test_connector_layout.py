"""Which layout of its cache vLLM is asked for, alone and beside other connectors."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvd.engines.vllm import connector

pytestmark = pytest.mark.filterwarnings("default")


def asked(monkeypatch: pytest.MonkeyPatch, *others: str, cpu: bool = False, mla: bool = False) -> Any:
    """What vLLM is asked for by kvd alone, or by MultiConnector of kvd and others."""
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    monkeypatch.delitem(sys.modules, connector._MULTI, raising=False)
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("KvdConnector", *others)]
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}
    transfer = KVTransferConfig(kv_role="kv_both", **(multi if others else {"kv_connector": "KvdConnector"}))
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=mla),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    return KVConnectorFactory.get_connector_class(transfer).get_required_kvcache_layout(config)


@pytest.mark.parametrize("other", ["OffloadingConnector", "NixlConnector", "SimpleCPUOffloadConnector"])
@pytest.mark.parametrize("cpu", [False, True])
def test_beside_other_connectors_it_is_the_layout_that_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, other: str, cpu: bool
) -> None:
    assert asked(monkeypatch, other, cpu=cpu) == "LBHNC"


def test_alone_on_a_gpu_a_block_of_all_layers_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch) == "BLHNC"
    assert asked(monkeypatch, cpu=True) == "LBHNC"
    assert asked(monkeypatch, mla=True) is None


@pytest.mark.real
@pytest.mark.slow
def test_vllm_imports_multi_connector_only_where_it_is_used() -> None:
    code = "import sys; import vllm.v1.engine.core, kvd.engines.vllm.connector as c; print(c._MULTI in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "False"
