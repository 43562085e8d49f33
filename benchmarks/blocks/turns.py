"""What a daemon's loop does in one go for a request of many blocks, in processor time."""

import time
from array import array
from collections.abc import Callable, Iterator

from kvd.actors.runtime.pools import BlocksInUse, check_spans
from kvd.bench.spec import flat_spec, tokens_of
from kvd.protocol import codec, ticket
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Pull

_BLOCK_BYTES = 64
_REPEATS = 5


def turns(blocks: int) -> Iterator[tuple[str, float]]:
    """What is done, and the seconds of the thread's own time that it takes: the least of several, pages being there."""
    spec = flat_spec(2 * blocks, _BLOCK_BYTES)
    spans = (Span(0, 0, array("I", range(0, 2 * blocks, 2)).tobytes()),)
    rank = TicketRank("producer", "ipc:///run/kvd/kvd.sock.peers", 1, "pool", "offer", 0, bytes(16), 2, 1, 1)
    named = Ticket(tokens_of(blocks), (rank,), (spans,))
    text = named.encode()
    frame = codec.encode(Pull(1, "pull", text, spans, 30.0))
    use = BlocksInUse(spec)

    def read_pull() -> None:
        codec.worker_requests.decode(frame)
        check_spans(spans, spec)

    def again(do: Callable[[], object], undo: Callable[[], object]) -> tuple[float, float]:
        pairs = [(_seconds(do), _seconds(undo)) for _ in range(_REPEATS)]
        return min(first for first, _ in pairs), min(second for _, second in pairs)

    taken, given_back = again(lambda: use.take(spans), lambda: use.give_back(spans))
    offered, released = again(lambda: use.offer(spans), lambda: use.release(spans))
    yield "a pull: read its message and check the ids", min(_seconds(read_pull) for _ in range(_REPEATS))
    yield "read its ticket", min(_seconds(lambda: ticket.decode(text)) for _ in range(_REPEATS))
    yield "mark its blocks as written to", taken
    yield "prove the ticket", min(_seconds(lambda: named.proof(rank)) for _ in range(_REPEATS))
    yield "at its end, give the blocks back", given_back
    yield "an offer: mark its blocks", offered
    yield "write its ticket", min(_seconds(named.encode) for _ in range(_REPEATS))
    yield "at its end, release the blocks", released


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started
