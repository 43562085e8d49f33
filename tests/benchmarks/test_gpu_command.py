"""`python -m benchmarks.gpu` over the stand-in driver: a dry run, whose figures say nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import run_step
from benchmarks.gpu.report import markdown
from benchmarks.gpu.steps import STEPS
from tests.support.gpu import over_standin

pytestmark = pytest.mark.real

QUICK = ["driver", "memory", "pulls", "kills", "workers", "vllm"]
"""Steps whose dry run takes seconds. `copies` and `pinned` are copies alone, `tests` are of this repository, and torch
takes long to import, as does NIXL."""


def dry_run(standin, folder: Path, *steps: str) -> tuple[int, dict, str]:
    report = folder / "check"
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--report", str(report), "--steps", *steps]
    ran = subprocess.run(
        command, env={**os.environ, **standin.environment}, capture_output=True, text=True, check=False
    )
    return ran.returncode, json.loads(report.with_suffix(".json").read_text()), report.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_dry_run_answers_what_can_be_asked_and_names_each_step_that_a_gpu_must_repeat(standin, tmp_path):
    status, document, text = dry_run(standin, tmp_path, *QUICK)
    steps = {step["step"]: step for step in document["steps"]}
    assert status == 0, [step["reason"] for step in document["steps"]]
    assert document["standin"]
    assert [name for name in QUICK if steps[name]["status"] == "skipped"] == ["vllm"]
    assert steps["memory"]["answers"]["survives its maker's SIGKILL"] is True
    assert steps["memory"]["answers"]["fresh memory is zero"] is False  # the stand-in's is not, on purpose
    kills = steps["kills"]["answers"]
    assert kills["done, a daemon killed"] + kills["failed, a daemon killed"] == 2
    assert kills["done, a worker killed"] + kills["failed, a worker killed"] == 1  # nobody hears of a dead one's pulls
    assert kills["pools kept, a daemon killed"] == kills["pools kept, a worker killed"] == 2
    assert set(steps["pulls"]["answers"]) == {
        "one block of 16 KiB, pools on the GPU, us",
        "one block of 16 KiB, in host memory, us",
        "one copy of all, GB/s",
        "blocks",
    }
    assert len(steps["pulls"]["answers"]["blocks"]) == 5
    assert "A dry run over the stand-in driver." in text
    for name in QUICK:
        assert f"| {name} | {STEPS[name].question} |" in text
        assert text.count("to be repeated") == len(QUICK)


@pytest.mark.slow
def test_a_dry_run_of_the_demo_and_of_nixl_alone_compares_tokens_and_bytes(standin, tmp_path):
    status, document, _ = dry_run(standin, tmp_path, "demo", "nixl")
    assert status == 0, document
    demo, raw = (step["answers"] for step in document["steps"])
    assert demo["tokens_equal"] is True
    assert len(raw["blocks"]) == 5


@pytest.mark.slow
def test_a_dry_run_of_pulls_between_hosts_kills_daemons_with_pools_on_either_side_or_both(standin, tmp_path):
    status, document, _ = dry_run(standin, tmp_path, "hosts")
    assert status == 0, document
    rows = document["steps"][0]["answers"]["hosts"]
    assert [(row["of"], row["into"]) for row in rows] == [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
    for row in rows:
        assert row["done, a daemon killed"] + row["failed, a daemon killed"] == row["pools kept, a daemon killed"] == 2


@pytest.mark.slow
def test_a_dry_run_of_the_copies_has_a_figure_for_each_size(standin, tmp_path):
    standin.set(delay_us=0)
    status, document, _ = dry_run(standin, tmp_path, "copies", "pinned")
    assert status == 0, document
    copies, pinned = (step["answers"] for step in document["steps"])
    assert [row["block"] for row in copies["blocks"]] == [4096 << shift for shift in (0, 2, 4, 6, 8)]
    assert [(row["pinned"], row["block"]) for row in pinned["slices"]] == [
        (pinned, block) for pinned in (False, True) for block in (16384, 4194304)
    ]


def test_a_gpu_that_is_not_there_fails_its_steps_and_the_report_says_why(standin, tmp_path):
    standin.set(device_count=0)
    status, document, text = dry_run(standin, tmp_path, "driver", "memory")
    assert status == 1
    assert [step["status"] for step in document["steps"]] == ["failed", "failed"]
    assert "CUDA_ERROR_NO_DEVICE" in text


def test_a_step_for_which_no_time_is_left_is_skipped():
    result = run_step("memory", time.monotonic() - 1, quick=True)
    assert (result.status, result.reason) == ("skipped", "no time was left")


def test_the_report_of_a_dry_run_names_every_step_as_one_that_a_gpu_must_repeat():
    ended = {"status": "passed", "seconds": 1.0, "answers": {}, "reason": ""}
    steps = [{"step": name, "question": step.question, **ended} for name, step in STEPS.items()]
    text = markdown({"standin": True, "steps": steps})
    for name, step in STEPS.items():
        assert f"| {name} | {step.question} | passed | 1.0 | to be repeated |" in text


def test_steps_that_failed_on_a_gpu_are_to_be_repeated_and_others_are_answered():
    names = {"step": "a", "question": "?", "seconds": 1.0, "answers": {}, "reason": ""}
    steps = [{**names, "status": "passed"}, {**names, "step": "b", "status": "failed", "reason": "it broke"}]
    text = markdown({"standin": False, "steps": steps})
    assert "| a | ? | passed | 1.0 | answered |" in text
    assert "| b | ? | failed | 1.0 | to be repeated |" in text
    assert "it broke" in text
    assert "1 steps passed, 1 steps failed" in text


@over_standin(driver_version=12070)
def test_a_driver_without_the_batched_call_is_said_to_have_none():
    from benchmarks.gpu.driver import facts  # noqa: PLC0415 - it takes the driver

    assert facts(quick=True)["batched copies"] is False
