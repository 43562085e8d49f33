"""What a run found, and which claims it breaks."""

from msgspec import Struct, field

from tests.fuzz.stage import Resources

MIB = 1 << 20
MOST_GROWTH = 64 * MIB
"""Resident bytes that the daemon may have more at the end than at the start."""
MOST_RATIO = 3.0
"""Times its p99 before that a pull of the honest neighbour may take."""
MOST_DESCRIPTORS = 32
"""Descriptors that may be open at the end beyond those of the start: links to peers that are not yet forgotten."""
FEWEST_PULLS = 100
"""Pulls in each phase below which a p99 says nothing."""
SLOWEST_PULLS = 10.0
"""Pulls a second below which the honest neighbour was starved; alone it makes hundreds."""


class Report(Struct):
    """One run. Latencies in seconds, of the honest neighbour's pulls before and during the attack."""

    seed: int
    keyed: bool
    seconds: float = 0.0
    wanted: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    rebuffed: dict[str, int] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """What the daemon did not answer at the end."""
    errors: list[str] = field(default_factory=list)
    """Of the fuzzer itself."""
    start: Resources = Resources(0, 0, 0)
    most: Resources = Resources(0, 0, 0)
    end: Resources = Resources(0, 0, 0)
    router_start: Resources = Resources(0, 0, 0)
    router_most: Resources = Resources(0, 0, 0)
    router_end: Resources = Resources(0, 0, 0)
    log_bytes: int = 0
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Of honest pulls."""

    @property
    def messages(self) -> int:
        """Sent by all attacks."""
        return sum(self.sent.values())

    @property
    def ratio(self) -> float:
        """The honest p99 during the attack over that before; 0 where there were too few pulls to say."""
        if min(len(self.before), len(self.during)) < FEWEST_PULLS:
            return 0.0
        return percentile(self.during, 99) / percentile(self.before, 99)

    def broken(self, *, latency: bool = True, whole: bool = True) -> list[str]:
        """The claims that this run breaks.

        Without `latency` honest pulls have to end as done, however late; without `whole` some messages may be unsent.
        """
        found = [f"a daemon died: {death}" for death in self.deaths]
        found += [f"no answer at the end: {each}" for each in self.silent]
        found += [f"the fuzzer failed: {each}" for each in self.errors]
        if self.failures:
            found.append(f"{len(self.failures)} honest pulls failed, the first: {self.failures[0]}")
        if self.deaths:
            return found
        if (grown := self.end.resident - self.start.resident) > MOST_GROWTH:
            found.append(f"resident memory grew by {grown / MIB:.0f} MiB, {MOST_GROWTH / MIB:.0f} is the bound")
        if (more := self.end.descriptors - self.start.descriptors) > MOST_DESCRIPTORS:
            found.append(f"{more} descriptors more than at the start, {MOST_DESCRIPTORS} is the bound")
        if (grown := self.router_most.resident - self.router_start.resident) > MOST_GROWTH:
            found.append(f"the router's memory grew by {grown / MIB:.0f} MiB, {MOST_GROWTH / MIB:.0f} is the bound")
        if whole and self.messages < self.wanted:
            found.append(f"only {self.messages} of {self.wanted} messages were sent in {self.seconds:.0f} s")
        if latency and self.ratio > MOST_RATIO:
            found.append(f"the honest p99 is {self.ratio:.1f} times that before, {MOST_RATIO:g} is the bound")
        if latency and len(self.during) < SLOWEST_PULLS * self.seconds:
            found.append(f"only {len(self.during)} honest pulls ended in {self.seconds:.0f} s")
        return found

    def text(self) -> str:
        """For a terminal."""
        lines = [f"seed {self.seed}, {'with' if self.keyed else 'without'} keys, {self.seconds:.0f} s", ""]
        lines += [f"  {'attack':34} {'messages':>9}  broken off"]
        lines += [f"  {name:34} {sent:9}  {self.rebuffed.get(name, 0)}" for name, sent in sorted(self.sent.items())]
        lines += [f"  {'all':34} {self.messages:9}  {sum(self.rebuffed.values())}", ""]
        resident = (each.resident / MIB for each in (self.start, self.most, self.end))
        lines += [f"deaths       {len(self.deaths)}"]
        lines += ["resident     {:.1f} MiB at the start, {:.1f} at most, {:.1f} at the end".format(*resident)]
        resident = (each.resident / MIB for each in (self.router_start, self.router_most, self.router_end))
        lines += ["router       {:.1f} MiB at the start, {:.1f} at most, {:.1f} at the end".format(*resident)]
        for what in ("descriptors", "threads"):
            numbers = (getattr(each, what) for each in (self.start, self.most, self.end))
            lines.append("{:12} {} at the start, {} at most, {} at the end".format(what, *numbers))
        lines += [f"logged       {self.log_bytes / MIB:.2f} MiB"]
        for when, pulls in (("before", self.before), ("during", self.during)):
            p50, p99 = percentile(pulls, 50) * 1e3, percentile(pulls, 99) * 1e3
            lines.append(f"honest pulls {when}: {len(pulls)}, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        lines += [f"ratio of p99 {self.ratio:.2f}; {len(self.failures)} failed", ""]
        broken = self.broken()
        return "\n".join(lines + ([f"BROKEN: {each}" for each in broken] or ["every claim holds"]))


def percentile(values: list[float], percent: int) -> float:
    """Of unordered values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0
