"""`python -m tests.fuzz`: attacks a real daemon over its real sockets, and says what became of it."""

import argparse
import inspect
import sys
import tempfile
from pathlib import Path

from tests.fuzz.attack import REGISTRY
from tests.fuzz.siege import Plan, besiege


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="gives the same messages again (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, of attack (default: %(default)s)")
    parser.add_argument("--open", action="store_true", help="a daemon as it is by default, without CURVE keys")
    parser.add_argument("--only", nargs="+", choices=sorted(REGISTRY), metavar="ATTACK", help="these attacks")
    parser.add_argument("--skip", nargs="+", choices=sorted(REGISTRY), default=[], metavar="ATTACK", help="not these")
    parser.add_argument("--each", action="store_true", help="one attack after the other, each on a fresh daemon")
    parser.add_argument("--list", action="store_true", help="show the attacks, and do nothing")
    parser.add_argument("--folder", type=Path, help="keep the daemons' logs here")
    return parser.parse_args()


def run(args: argparse.Namespace, attacks: list[str], folder: Path) -> int:
    """Runs all at a time, or each alone; how many runs broke a claim."""
    if not args.each:
        report = besiege(Plan(args.messages, args.seed, args.seconds, attacks, keyed=not args.open), folder)
        print(report.text())
        return len(report.broken())
    failed = 0
    for name in attacks:
        place = folder / name
        place.mkdir()
        plan = Plan(args.messages, args.seed, args.seconds, [name], keyed=not args.open, before_seconds=3.0)
        report = besiege(plan, place)
        broken = report.broken()
        failed += bool(broken)
        growth = (report.most.resident - report.start.resident) / (1 << 20)
        print(
            f"{name}: {report.messages} messages, {report.seconds:.0f} s, at most {growth:+.0f} MiB, "
            f"log {report.log_bytes >> 10} KiB, p99 x{report.ratio:.1f}: {'; '.join(broken) or 'holds'}",
            flush=True,
        )
    return failed


def main() -> int:
    """0 where every claim held."""
    args = arguments()
    attacks = [name for name in sorted(REGISTRY) if name in (args.only or REGISTRY) and name not in args.skip]
    if args.list:
        for name in attacks:
            print(f"{name:34} {REGISTRY[name].who:9} {inspect.getdoc(REGISTRY[name])}")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        return 1 if run(args, attacks, folder) else 0


if __name__ == "__main__":
    sys.exit(main())
