"""The decode engine's process: tickets in, tokens out."""

import time
from dataclasses import dataclass, field

from kvd import client
from kvd.engines.demo.engine import AttachedEngine, Loop
from kvd.engines.demo.messages import Channel, Decoded, DecodeRequest, Failed, Pulled, ToDecode

IDLE_SECONDS = 0.02
PULLING_SECONDS = 0.0005
"""How long to wait for the router if idle, and for the daemon while pulls run."""


@dataclass
class Sequence:
    """A request with blocks: first its KV is pulled, then its tokens are decoded."""

    request: DecodeRequest
    table: list[int]
    started: float
    missing: int
    """Ranks whose pull has no outcome yet."""
    tokens: list[int] = field(default_factory=list)


class DecodeEngine(Loop[DecodeRequest]):
    """Pulls for each request as soon as there are blocks; decodes what has arrived, a token per turn.

    It does not decode while a pull runs, so that the reported times are those of pulls: on two cores a pull would wait
    for a decoding step.
    """

    def __init__(self, kv: AttachedEngine, channel: Channel[ToDecode]) -> None:
        super().__init__(kv, channel)
        self._pulling: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}

    def run(self) -> None:
        """Serves until stopped and nothing is left to decode."""
        while not (self._stopping and not self._waiting and not self._pulling and not self._running):
            self._receive(IDLE_SECONDS if not self._pulling and not self._running else 0.0)
            self._admit()
            if self._pulling:
                self._collect()
            else:
                for sequence in list(self._running.values()):
                    self._decode(sequence)

    def _admit(self) -> None:
        blocks = self._kv.blocks
        while self._waiting and blocks.can_allocate(self._waiting[0].prompt_tokens + self._waiting[0].count):
            request = self._waiting.popleft()
            table = blocks.allocate(request.request, request.prompt_tokens + request.count)
            self._pulling[request.request] = Sequence(
                request, table, started=time.monotonic(), missing=self._kv.ranks, tokens=[request.token]
            )
            self._kv.pull(request.request, request.ticket, request.prompt_tokens, table)

    def _collect(self) -> None:
        for event in self._kv.poll(PULLING_SECONDS):
            if isinstance(event, client.Done):
                self._arrived(event.request)
            elif isinstance(event, client.Failed):
                # The blocks stay allocated: a failure ends the demo, and until `Freed` they might still be written to.
                self._channel.send(Failed(request=event.request, text=f"{event.code}: {event.text}"))

    def _arrived(self, request: str) -> None:
        sequence = self._pulling[request]
        sequence.missing -= 1
        if not sequence.missing:
            self._running[request] = self._pulling.pop(request)
            pulled = sequence.table[: self._kv.blocks.blocks_for(sequence.request.prompt_tokens)]
            self._channel.send(Pulled(request=request, blocks=pulled, started=sequence.started, ended=time.monotonic()))

    def _decode(self, sequence: Sequence) -> None:
        request, tokens = sequence.request, sequence.tokens
        if len(tokens) < request.count:
            position = request.prompt_tokens + len(tokens) - 1
            tokens.append(self._kv.engine.decode(tokens[-1], position, sequence.table))
        if len(tokens) == request.count:
            del self._running[request.request]
            self._kv.blocks.free(request.request)
            self._channel.send(Decoded(request=request.request, tokens=tokens))


if __name__ == "__main__":
    DecodeEngine.main(ToDecode)
