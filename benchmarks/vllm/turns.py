"""What a conversation gains if blocks travel back from decode to prefill: `python -m benchmarks.vllm.turns`.

One pair of servers with kvd, each pinned to a core, has two routers before it: `kvd router`, and `kvd router
--single-turn`, which keeps nothing of conversations. In each round one conversation goes through either, turn by turn,
under names that keep their caches apart. Measured are the time to the first token of each turn, and the tokens that the
prefill server computes for it, by vLLM's own metrics.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.command import make_parser, run
from benchmarks.estimate import Estimate, cell, estimate
from benchmarks.vllm.servers import MODEL, as_users_run, model_folder, resume
from kvd.bench.report import progress, write_json
from kvd.errors import BadRequest, ErrorCode, refusal
from tests.vllm.testbed.conversation import Conversation, Talking
from tests.vllm.testbed.servers import RouterProcess
from tests.vllm.testbed.service import start_all, stop_all

LONGEST: Final = 4000
"""Tokens of a conversation: the model has 4,096 positions."""

GOAL: Final = 0.6
"""Of the last turn's time to first token without blocks that travel back."""

KEPT, COMPUTED = "kept", "computed"
"""What becomes of an answer in the next turn's prefill."""


@dataclass(slots=True)
class Turn:
    """What was measured of one turn: an entry for each round, by what became of the last answer."""

    first_token: dict[str, list[float]] = field(default_factory=lambda: {KEPT: [], COMPUTED: []})
    """Seconds from the request to the first token."""
    prefilled: dict[str, list[float]] = field(default_factory=lambda: {KEPT: [], COMPUTED: []})
    """Tokens that the prefill server computed."""

    @property
    def ratio(self) -> Estimate:
        """Of the times to first token."""
        return estimate(self.first_token[KEPT], self.first_token[COMPUTED])


@dataclass(frozen=True, slots=True)
class Plan:
    """Conversations of `turns` turns, each of `asked` tokens and an answer of `answered`."""

    turns: int
    asked: int
    answered: int
    rounds: int
    seconds: float


WARMING: Final = Plan(turns=2, asked=200, answered=100, rounds=1, seconds=0)
"""Which is not measured: the first conversation pays for handshakes and page faults."""


async def measure(folder: Path, plan: Plan, advance: Callable[[], None]) -> list[Turn]:
    """Measures until `rounds` or `seconds` are over; of the turns only rounds that ended for all of them count."""
    talking = Talking(folder, folder, MODEL)
    as_users_run(talking.pair)
    without = RouterProcess(folder, talking.pair.prefill, talking.pair.decode, "--single-turn", name="router-single")
    routers = {KEPT: talking.router, COMPUTED: without}
    services = [*talking.pair.services, *routers.values()]
    turns = [Turn() for _ in range(plan.turns)]
    try:
        async with asyncio.timeout(plan.seconds) as limit:
            await start_all(services)
            resume(talking.pair, "pinned")
            await _round(talking, routers, [Turn(), Turn()], WARMING, number=0, advance=lambda: None)
            advance()
            for number in range(1, 1 + plan.rounds):
                found = [Turn() for _ in turns]
                await _round(talking, routers, found, plan, number=number, advance=advance)
                for turn, more in zip(turns, found, strict=True):
                    for way in routers:
                        turn.first_token[way] += more.first_token[way]
                        turn.prefilled[way] += more.prefilled[way]
    except TimeoutError:
        if not limit.expired():  # a turn was not kept, or a server is not up
            raise
    finally:
        stop_all(services)
    return turns


async def _round(
    talking: Talking,
    routers: dict[str, RouterProcess],
    turns: Sequence[Turn],
    plan: Plan,
    *,
    number: int,
    advance: Callable[[], None],
) -> None:
    """A conversation each way, in turns; who comes first changes from turn to turn and from round to round."""
    talks = {way: Conversation(talking, f"{way} {number}", number, router=router) for way, router in routers.items()}
    for place, turn in enumerate(turns):
        for way, talk in list(talks.items())[:: 1 if (number + place) % 2 else -1]:
            before, body = await talking.prefilled(), talk.body(plan.answered, plan.asked)
            begun = time.perf_counter()
            turn.first_token[way].append((await talk.turn(body)).times[0] - begun)
            counted = await talking.prefilled_since(before, len(body["prompt"]), turns=0)
            turn.prefilled[way].append(counted["computed"])
            advance()
        await talking.asked()


def report(turns: Sequence[Turn], plan: Plan) -> Iterator[str]:
    """A Markdown table with a line for each turn, and whether the goal is met."""
    rounds = len(turns[0].first_token[KEPT])
    yield f"turns of {plan.asked} + {plan.answered} tokens, medians of {rounds} rounds, in brackets the 95 % interval"
    yield ""
    yield "| turn | first token | without D to P | ratio | P computes | without D to P |"
    yield "|---|---|---|---|---|---|"
    for number, turn in enumerate(turns, 1):
        times = [cell(estimate(turn.first_token[way]), 1e3, "ms") for way in (KEPT, COMPUTED)]
        tokens = [f"{statistics.median(turn.prefilled[way]):.0f} tokens" for way in (KEPT, COMPUTED)]
        yield f"| {number} | {' | '.join([*times, cell(turn.ratio), *tokens])} |"
    yield ""
    last = turns[-1].ratio
    verdict = "met" if last.value <= GOAL else "missed"
    yield f"turn {len(turns)} takes {last.value:.2f} of its time without D to P; goal {GOAL}: {verdict}"


def _measure(args: argparse.Namespace) -> None:
    plan = Plan(args.turns, args.asked, args.answered, args.rounds, args.seconds)
    if min(plan.turns, plan.asked, plan.answered, plan.rounds) < 1:
        raise BadRequest(ErrorCode.BAD_CONFIG, "--turns, --asked, --answered and --rounds: must be 1 or more")
    if (tokens := plan.turns * (plan.asked + plan.answered)) > LONGEST:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"a conversation of {tokens} tokens: at most {LONGEST}")
    steps = 1 + 2 * plan.rounds * plan.turns
    with model_folder("turns") as folder, progress("servers start, then conversations", steps) as advance:
        turns = asyncio.run(measure(folder, plan, advance))
    if not turns[0].first_token[KEPT]:
        raise refusal(ErrorCode.CANCELLED, f"no round was over after {plan.seconds:.0f} s; raise --seconds")
    print("\n".join(report(turns, plan)))
    write_json(args.json, {"plan": plan, "turns": turns})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = make_parser("vllm.turns", __doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="of a conversation (default: 5)")
    parser.add_argument("--asked", type=int, default=200, help="tokens of each question (default: 200)")
    parser.add_argument("--answered", type=int, default=400, help="tokens of each answer (default: 400)")
    parser.add_argument("--rounds", type=int, default=5, help="conversations each way (default: 5)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after this long and report what there is")
    return run(parser, _measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
