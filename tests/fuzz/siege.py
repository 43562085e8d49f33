"""One run: the honest neighbour alone, then beside the attackers, then whether the daemon is what it was."""

import os
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct

from tests.fuzz.attack import REGISTRY, Place
from tests.fuzz.attackers import Orders
from tests.fuzz.report import MOST_DESCRIPTORS, MOST_GROWTH, Report
from tests.fuzz.stage import Resources, Stage, resources
from tests.support.patience import PATIENCE

SAMPLE_SECONDS = 0.2


class Plan(Struct, frozen=True):
    """What a run does: `messages` in all, dealt to `attacks` by what theirs cost, within `seconds`."""

    messages: int
    seed: int
    seconds: float
    attacks: Collection[str]
    keyed: bool = True
    before_seconds: float = 10.0

    def shares(self) -> dict[str, int]:
        """Messages of each attack, at least one."""
        weights = {name: 1.0 / REGISTRY[name].cost for name in self.attacks}
        whole = sum(weights.values())
        return {name: max(1, round(self.messages * weight / whole)) for name, weight in weights.items()}


def besiege(plan: Plan, folder: Path) -> Report:
    """Runs a plan with processes and files under `folder`; nothing of it is left but the files."""
    report = Report(plan.seed, plan.keyed)
    with Stage(folder, keyed=plan.keyed) as stage:
        place = stage.place()
        honest = stage.honest()
        honest.since()
        groups = _orders(plan, place)
        with ExitStack() as stack:  # as many cores are busy as later
            for who in groups:
                idle = Orders(place, 0, {}, 0.0, idle=True)
                stack.enter_context(stage.attackers(f"idle-{who}", idle))
            honest.since()
            time.sleep(plan.before_seconds)
            report.before = honest.since().seconds
        report.start = report.most = resources(place.pid)
        report.router_start = report.router_most = resources(stage.router.pid)
        log = stage.log_bytes()
        begun = time.monotonic()
        with ExitStack() as stack:
            running = {who: stack.enter_context(stage.attackers(who, orders))[1] for who, orders in groups.items()}
            _watch(stage, place, running, report, begun + plan.seconds + PATIENCE)
            report.seconds = time.monotonic() - begun
        if not report.deaths:
            pulls = honest.since()
            report.during = pulls.seconds
            _settle(stage, place, report)
            report.failures = pulls.failures + honest.since().failures
            report.silent = stage.answers()
            report.deaths = stage.dead()
        report.log_bytes = stage.log_bytes() - log
        report.wanted = sum(sum(orders.shares.values()) for orders in groups.values())
    return report


def _orders(plan: Plan, place: Place) -> dict[str, Orders]:
    """By who attacks. Strangers are another user where we may become one."""
    shares = plan.shares()
    if not place.ports:
        shares.pop("transport-ports", None)
    if os.geteuid():
        shares = {name: share for name, share in shares.items() if REGISTRY[name].who != "crowd"}
    return {
        who: Orders(
            place,
            plan.seed,
            {name: share for name, share in shares.items() if REGISTRY[name].who == who},
            plan.seconds,
            become_nobody=who == "stranger" and os.geteuid() == 0,
        )
        for who in sorted({REGISTRY[name].who for name in shares})
    }


def _watch(stage: Stage, place: Place, running: dict, report: Report, until: float) -> None:
    """Counts what is sent and what the daemon takes, until the attackers have ended, a daemon has, or the time."""
    while running and time.monotonic() < until:
        for who, lines in list(running.items()):
            told = lines.waiting(SAMPLE_SECONDS / len(running))
            if told is None:
                del running[who]
                continue
            for counts in told:
                report.sent |= counts.sent
                report.rebuffed |= counts.rebuffed
                report.errors += [counts.error] if counts.error else []
        with suppress(OSError):
            report.most = _higher(report.most, resources(place.pid))
            report.router_most = _higher(report.router_most, resources(stage.router.pid))
        report.deaths = stage.dead()
        if report.deaths:
            return


def _higher(one: Resources, other: Resources) -> Resources:
    return Resources(
        max(one.resident, other.resident),
        max(one.descriptors, other.descriptors),
        max(one.threads, other.threads),
    )


def _settle(stage: Stage, place: Place, report: Report) -> None:
    """Waits until the daemon is about as small as it was: what attackers had ends by time-outs."""
    until = time.monotonic() + PATIENCE
    while not stage.dead():
        with suppress(OSError):
            report.end = resources(place.pid)
            report.router_end = resources(stage.router.pid)
        small = report.end.resident <= report.start.resident + MOST_GROWTH // 2
        few = report.end.descriptors <= report.start.descriptors + MOST_DESCRIPTORS // 2
        if (small and few) or time.monotonic() > until:
            return
        time.sleep(SAMPLE_SECONDS)
