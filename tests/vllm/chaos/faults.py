"""Faults drawn from a seed: equal seeds give the same faults in the same order, whatever the processes make of them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

KINDS: Final = ("kill", "suspend")

MOST: Final = 3
"""Faults of one round."""

BEGIN_SECONDS: Final = 4.0
"""The faults of a round begin within it, so that some overlap."""

DOWN_SECONDS: Final = 3.0
"""What is dead is started again by then, as a service manager does."""

SUSPENDED_SECONDS: Final = (0.05, 8.0)
"""Shorter and longer than all times after which daemons miss each other (three heartbeats, `claim_ttl`)."""

CALM_SECONDS: Final = 4.0
"""After a round everything is left alone for so long at most, and has to work."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A process dies by SIGKILL, or is suspended by SIGSTOP with all that it started; times in seconds."""

    victim: str
    kind: Literal["kill", "suspend"]
    after: float
    """From the beginning of the round."""
    lasts: float
    """Until it is started again, or continued."""

    def __str__(self) -> str:
        return f"{self.kind} {self.victim} after {self.after:.1f} s for {self.lasts:.2f} s"


@dataclass(frozen=True, slots=True)
class Round:
    """Faults of different victims, and how long everything is left alone when all of it works again."""

    faults: tuple[Fault, ...]
    calm: float


def draw(seed: int, victims: Sequence[str]) -> Iterator[Round]:
    """Rounds without an end, on processes of these names."""
    source = random.Random(seed)  # noqa: S311  # no secret
    while True:
        chosen = source.sample(sorted(victims), source.randint(1, min(MOST, len(victims))))
        yield Round(tuple(_fault(source, victim) for victim in chosen), source.uniform(0, CALM_SECONDS))


def _fault(source: random.Random, victim: str) -> Fault:
    kind: Literal["kill", "suspend"] = "kill" if source.random() < 0.5 else "suspend"
    shortest, longest = SUSPENDED_SECONDS
    lasts = source.uniform(0, DOWN_SECONDS)
    if kind == "suspend":
        lasts = shortest * (longest / shortest) ** source.random()  # as often for 0.1 to 1 s as for 1 to 10 s
    return Fault(victim, kind, source.uniform(0, BEGIN_SECONDS), lasts)
