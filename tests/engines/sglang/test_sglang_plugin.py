"""What kvd's plugin changes in SGLang, with stand-ins for the modules that it changes."""

import logging
import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvd.engines.sglang.plugin import register


class Kind(Enum):
    KVARGS = "kvargs"
    MANAGER = "manager"


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], _: HookType) -> None:
        assert target not in cls.hooks
        cls.hooks[target] = hook


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    class TransferBackend(Enum):
        NIXL = "nixl"

    HookRegistry.hooks = {}
    modules = {
        name: ModuleType(name)
        for name in (
            "sglang",
            "sglang.srt",
            "sglang.srt.arg_groups",
            "sglang.srt.arg_groups.choices",
            "sglang.srt.disaggregation",
            "sglang.srt.disaggregation.utils",
            "sglang.srt.plugins",
            "sglang.srt.plugins.hook_registry",
        )
    }
    choices: Any = modules["sglang.srt.arg_groups.choices"]
    choices.DISAGG_TRANSFER_BACKEND_CHOICES = ["nixl"]
    choices.add_disagg_transfer_backend_choices = choices.DISAGG_TRANSFER_BACKEND_CHOICES.extend
    arguments: Any = modules["sglang.srt.arg_groups"]
    arguments.choices = choices
    utils: Any = modules["sglang.srt.disaggregation.utils"]
    utils.TransferBackend = TransferBackend
    registry: Any = modules["sglang.srt.plugins.hook_registry"]
    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_users_can_choose_the_backend_by_its_name(sglang: dict[str, Any]) -> None:
    register()
    backends = sglang["sglang.srt.disaggregation.utils"].TransferBackend
    assert sglang["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES == ["nixl", "kvd"]
    assert backends("kvd") is backends("kvd") is not backends.NIXL
    assert backends("kvd").value == "kvd"


def test_a_second_call_changes_nothing(sglang: dict[str, Any]) -> None:
    register()
    register()
    assert sglang["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES == ["nixl", "kvd"]


def test_the_classes_of_other_backends_are_sglangs(sglang: dict[str, Any]) -> None:
    register()
    hook = HookRegistry.hooks["sglang.srt.disaggregation.utils.get_kv_class"]
    backends = sglang["sglang.srt.disaggregation.utils"].TransferBackend
    assert hook(lambda *asked: asked, backends.NIXL, Kind.MANAGER) == (backends.NIXL, Kind.MANAGER)
    assert hook(lambda *asked: asked, backends("kvd"), Kind.KVARGS) == (backends("kvd"), Kind.KVARGS)


@pytest.mark.parametrize(
    ("retracted", "prompt"),
    [({}, [5, 6]), ({"pd_rebootstrap_in_progress": False}, [5, 6]), ({"pd_rebootstrap_in_progress": True}, [5, 6, 7])],
)
@pytest.mark.usefixtures("sglang")
def test_the_prompt_of_a_request_that_is_prefilled_again_ends_with_what_it_had_computed(
    retracted: dict[str, bool], prompt: list[int]
) -> None:
    register()
    hook = HookRegistry.hooks["sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"]
    queue, enqueued = MagicMock(), MagicMock()
    queue.scheduler.model_config.vocab_size = 9
    request = SimpleNamespace(bootstrap_host="prefill", origin_input_ids=[5, 6], output_ids=[7], **retracted)
    assert hook(lambda *_, **__: enqueued, queue, request, is_rebootstrap=True) is enqueued
    enqueued.kv_receiver.expect.assert_called_once_with(prompt, "prefill", 9)


def test_an_sglang_of_another_kind_is_left_alone_with_a_warning(
    sglang: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    del sglang["sglang.srt.disaggregation.utils"].TransferBackend
    with caplog.at_level(logging.WARNING):
        register()
    assert "not 0.5.23" in caplog.text
    assert sglang["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES == ["nixl"]
    assert not HookRegistry.hooks
