"""`python -m tests.vllm.chaos`: a real pair under load while its processes die and stand still."""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.vllm.groups import GROUPS
from kvd.errors import KvdError
from kvd.processes import ProcessEndedError
from tests.vllm.chaos.clients import Outcome
from tests.vllm.chaos.run import MODEL, Bounds, Plan, Verdict, run
from tests.vllm.testbed.catalog import write_models
from tests.vllm.testbed.http import HttpError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the status is 1 if something broke that must hold."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.chaos",
        description="A prefill and a decode server with a daemon each, under load. At random, processes are killed "
        "(SIGKILL) and started again, or suspended (SIGSTOP) and continued, several at a time. No token may be wrong, "
        "no request late, and everything has to work again soon after the last fault.",
    )
    parser.add_argument("--seconds", type=float, default=600, help="begin no more faults after this (default: 600)")
    parser.add_argument("--seed", type=int, help="of a run that is to be made again: the same faults in their order")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--groups", choices=GROUPS, default="session", help="as in benchmarks.vllm (default: session)")
    parser.add_argument("--router", action="store_true", help="kvd router before the pair, and among the victims")
    bounds = Bounds()
    parser.add_argument("--deadline", type=float, default=bounds.deadline, help="of a request, in seconds (60)")
    parser.add_argument("--recovery", type=float, default=bounds.recovery, help="after a round's last fault (10)")
    args = parser.parse_args(arguments)
    plan = Plan(
        seed=random.randrange(1 << 32) if args.seed is None else args.seed,  # noqa: S311  # no secret
        seconds=args.seconds,
        policy=args.policy,
        groups=args.groups,
        router=args.router,
        bounds=Bounds(deadline=args.deadline, recovery=args.recovery),
    )
    flags = f"--policy {plan.policy} --groups {plan.groups}{' --router' * plan.router}"
    print(f"again: {parser.prog} --seed {plan.seed} --seconds {plan.seconds:g} {flags}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvd-chaos-"))
    try:
        write_models(folder, MODEL)
        verdict = asyncio.run(run(plan, folder / "pair", folder, lambda line: print(line, flush=True)))
    except KvdError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except (HttpError, ProcessEndedError, TimeoutError) as error:
        verdict = Verdict(broken=[f"{type(error).__name__}: {error}"])
    _report(verdict)
    if verdict.broken:
        print(f"the logs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _report(verdict: Verdict) -> None:
    if verdict.recoveries:
        told = ", ".join(f"{verdict.outcomes[outcome]} {outcome}" for outcome in Outcome)
        print(f"{verdict.faults} faults in {verdict.rounds} rounds; requests: {told}")
        print(f"all worked again {max(verdict.recoveries):.1f} s after a round's last fault at the latest")
    for line in verdict.broken:
        print(f"broken: {line}")


if __name__ == "__main__":
    sys.exit(main())
