"""`python -m benchmarks.gpu`: what only a GPU can say of kvd, on one GPU without a network, as Markdown and JSON.

Each step is a process of its own with a time limit: one that hangs, or ends with the driver, costs its answers only.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.report import markdown
from benchmarks.gpu.steps import STEPS

TOTAL_SECONDS: Final = 540.0
"""For all steps: runs on machines that are lent end after ten minutes."""


@dataclass
class Result:
    """How a step ended: `passed`, `failed` or `skipped`; `reason` says why not."""

    step: str
    question: str
    status: str
    seconds: float
    answers: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command: 0 if no step failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("out/gpu-check"), metavar="PATH", help="without its suffix")
    parser.add_argument("--quick", action="store_true", help="small pools and few rounds, as for a dry run")
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS), help="only these")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + TOTAL_SECONDS
    results = []
    for name in args.steps:
        result = run_step(name, deadline, quick=args.quick)
        results.append(result)
        print(f"{result.status:8}{result.seconds:6.1f} s  {name}  {result.reason[-200:]}", flush=True)
    standin = any("Stand-in" in str(result.answers.get("name", "")) for result in results)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    document = {"standin": standin, "steps": [asdict(result) for result in results]}
    args.report.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    args.report.with_suffix(".md").write_text(markdown(document))
    print(f"report: {args.report.with_suffix('.md')}")
    return int(any(result.status == "failed" for result in results))


def run_step(name: str, deadline: float, *, quick: bool) -> Result:
    """One step, in a process of its own, until it ends or time is over."""
    step = STEPS[name]
    began = time.monotonic()
    left = min(step.seconds, deadline - began)
    if left <= 0:
        return Result(name, step.question, "skipped", 0.0, reason="no time was left")
    command = [sys.executable, "-m", "benchmarks.gpu.steps", name, *(["--quick"] if quick else [])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        return Result(name, step.question, "failed", left, reason=f"it did not end within {left:.0f} s")
    seconds = time.monotonic() - began
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    said: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "skipped" in said:
        return Result(name, step.question, "skipped", seconds, reason=said["skipped"])
    if ran.returncode or not lines:
        reason = f"status {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-6000:]}"
        return Result(name, step.question, "failed", seconds, reason=reason)
    return Result(name, step.question, "passed", seconds, said["answers"])


if __name__ == "__main__":
    sys.exit(main())
