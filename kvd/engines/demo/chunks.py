"""A long prompt, prefilled in chunks: its blocks are read when all of it is computed, or while it is.

Both engines run in this process, and attach to the daemons beside the demo's own: nothing else computes meanwhile.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from kvd.client import Done, Failed, NotExtended, Released
from kvd.engines.demo.engine import PULL_TIMEOUT, AttachedEngine
from kvd.engines.demo.messages import EngineConfig
from kvd.engines.demo.router import RequestFailedError
from kvd.engines.demo.timeline import AT_ONCE, IN_TURN, Timeline
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import decode as decode_status

CHUNK_TOKENS = 128
TOKENS = 8 * CHUNK_TOKENS
"""32 MiB of KV."""

_SAMPLE_SECONDS = 0.02
"""Daemons answer a hundred times a second."""
_POLL_SECONDS = 0.002


def traced(prefill: EngineConfig, decode: EngineConfig, vocab: int) -> list[Timeline]:
    """Both ways, after a short request of each kind: the first ones pay for handshakes and pages.

    Raises:
        RequestFailedError: The blocks did not come, or gave other tokens one way than the other.

    """
    engines = [AttachedEngine(_longer(config)) for config in (prefill, decode)]
    generator = torch.Generator().manual_seed(prefill.seed + 1)
    prompt = torch.randint(vocab, (TOKENS,), generator=generator).tolist()
    tokens, lines = [], []
    try:
        for title in (IN_TURN, AT_ONCE):
            _Trace(engines, f"first {title}", prompt[:CHUNK_TOKENS], title).run()
        for title in (IN_TURN, AT_ONCE):
            trace = _Trace(engines, title, prompt, title)
            with _sampled(decode.socket, trace):
                tokens.append(trace.run())
            lines.append(trace.line)
    finally:
        for engine in engines:
            engine.detach()
    if len(set(tokens)) > 1:
        raise RequestFailedError(f"the same prompt gave the tokens {tokens}: {IN_TURN}, and {AT_ONCE}")
    return lines


def _longer(config: EngineConfig) -> EngineConfig:
    """The same engine beside the other, with room for the prompt and the token after it."""
    blocks = -(-(TOKENS + 1) // config.block_tokens)
    return msgspec.structs.replace(config, name=f"{config.name}-long", num_blocks=blocks)


class _Trace:
    """One request of `engines`, those of the prefill and of the decode side."""

    def __init__(self, engines: Sequence[AttachedEngine], name: str, prompt: Sequence[int], title: str) -> None:
        self._prefill, self._decode = engines
        self._name = name
        self._prompt = prompt
        self._token_bytes = sum(rank.token_bytes for rank in self._decode.engine.ranks)
        self.line = Timeline(title, [(0.0, 0)], [(0.0, 0)])
        self._begun = time.perf_counter()

    def run(self) -> int:
        """The token after the prefill engine's, which the decode engine computes."""
        prefill, decode, count = self._prefill, self._decode, len(self._prompt)
        tables = [engine.blocks.allocate(self._name, count + 1) for engine in (prefill, decode)]
        at_once = self.line.title == AT_ONCE
        if at_once:
            decode.pull(self._name, prefill.open(self._name), count, tables[1])
        for first in range(0, count, CHUNK_TOKENS):
            stop = first + CHUNK_TOKENS
            token = prefill.engine.prefill(self._prompt[first:stop], tables[0], first)
            if at_once:
                prefill.extend(self._name, first, stop, tables[0], closes=stop == count)
                self.line.complete.append((self.now(), stop * self._token_bytes))
        self.line.prefilled = self.now()
        if not at_once:
            ticket = prefill.offer(self._name, count, tables[0])
            self.line.complete.append((self.now(), count * self._token_bytes))
            decode.pull(self._name, ticket, count, tables[1])
        _wait(decode, Done)
        token = decode.engine.decode(token, count, tables[1])
        self.line.first_token = self.now()
        self.line.complete.append((self.line.first_token, count * self._token_bytes))
        _wait(prefill, Released)
        for engine in (prefill, decode):
            engine.blocks.free(self._name)
        return token

    def now(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._begun


def _wait(engine: AttachedEngine, outcome: type[Done | Released]) -> None:
    """Waits until each rank has said that its part has ended so."""
    ended, until = 0, time.monotonic() + PULL_TIMEOUT
    while ended < engine.ranks:
        for event in engine.poll(_POLL_SECONDS):
            if isinstance(event, Failed | NotExtended):
                raise RequestFailedError(f"{event.code}: {event.text}")
            ended += isinstance(event, outcome)
        if time.monotonic() > until:
            raise RequestFailedError(f"the blocks of a long prompt did not come within {PULL_TIMEOUT:.0f} s")


@contextmanager
def _sampled(socket: str, trace: _Trace) -> Iterator[None]:
    """Notes inside the context what the daemon at `socket` has read."""
    ended = threading.Event()

    def sample() -> None:
        with Inquiry(socket) as inquiry:
            before = decode_status(inquiry.status(PULL_TIMEOUT)).totals.read_bytes
            while True:
                last = ended.wait(_SAMPLE_SECONDS)
                read = decode_status(inquiry.status(PULL_TIMEOUT)).totals.read_bytes
                trace.line.read.append((trace.now(), read - before))
                if last:
                    return

    sampling = threading.Thread(target=sample, name="kvd-demo-samples")
    sampling.start()
    try:
        yield
    finally:
        ended.set()
        sampling.join()
