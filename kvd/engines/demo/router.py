"""The demo's router: sends requests to the prefill engine, and its tickets to the decode engine."""

import os
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvd.engines.demo.messages import (
    Decoded,
    DecodeRequest,
    Failed,
    FromEngine,
    Lines,
    Prefilled,
    Prompt,
    Pulled,
    Ready,
    Released,
    Stop,
    line,
)
from kvd.processes import Child

CONCURRENT: Final = 8
"""Requests at a time: few enough that a pipe holds what is queued, so that no write to an engine blocks."""

SILENCE_SECONDS: Final = 60.0
"""After so long without any message the run fails: more than attaching, a prompt or a pull may take."""

STOP_SECONDS: Final = 10.0
"""How long engines may take to return their pools."""


class RequestFailedError(Exception):
    """A request did not get its tokens."""


@dataclass
class Request:
    """A request and its results. Times are in seconds."""

    name: str
    prompt: list[int]
    ticket: str = ""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the decode engine that were pulled into."""
    pull_started: float = 0.0
    """On the monotonic clock that all processes share."""
    pull_ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Why each rank's offer ended."""


class Router:
    """Passes messages until every request is decoded and released, and watches that every process lives.

    `progress` is called with the name of a step each time a request has taken it: `prefilled`, `pulled`, `decoded`.
    """

    def __init__(
        self, prefill: Child, decode: Child, daemons: Sequence[Child], progress: Callable[[str], None]
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._progress = progress
        self._selector = selectors.DefaultSelector()
        for engine in (prefill, decode):
            lines: Lines[FromEngine] = Lines(FromEngine)
            self._selector.register(engine.source, selectors.EVENT_READ, (engine, lines))
        for daemon in daemons:
            self._selector.register(daemon.exit, selectors.EVENT_READ, (daemon, None))
        self._waiting: deque[Request] = deque()
        self._open: dict[str, Request] = {}
        self._count = 0
        self._engines_ready = 0

    def start(self) -> None:
        """Waits until both engines have their pools.

        Raises:
            ProcessEndedError: A process ended early.
            RequestFailedError: Nothing happened for too long.

        """
        while self._engines_ready < 2:
            self._step()

    def run(self, requests: Sequence[Request], count: int) -> None:
        """Gets `count` tokens for each of `requests`. Raises as `start` does; one failed request fails the run."""
        self._count = count
        self._waiting.extend(requests)
        self._send_prompts()
        while self._open:
            self._step()

    def stop(self) -> None:
        """Ends both engines, which give their pools back.

        Raises:
            RequestFailedError: One did not end in time.

        """
        for engine in (self._decode, self._prefill):
            engine.write(line(Stop()))
        for engine in (self._decode, self._prefill):
            if not engine.wait(STOP_SECONDS):
                raise RequestFailedError(f"{engine.name} did not return its pools within {STOP_SECONDS:.0f} s")

    def close(self) -> None:
        """Stops watching."""
        self._selector.close()

    def _step(self) -> None:
        ready = self._selector.select(SILENCE_SECONDS)
        if not ready:
            raise RequestFailedError(f"nothing happened for {SILENCE_SECONDS:.0f} s; open: {sorted(self._open)}")
        for key, _ in ready:
            child, lines = key.data
            data = os.read(child.source, 1 << 16) if lines else b""
            if not data:
                raise child.ended()
            for message in lines.feed(data):
                self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self._engines_ready += 1
            case Failed():
                raise RequestFailedError(f"{message.request}: {message.text}")
            case Prefilled():
                self._send_to_decode(message)
            case Pulled():
                request = self._open[message.request]
                request.blocks = message.blocks
                request.pull_started, request.pull_ended = message.started, message.ended
                self._progress("pulled")
            case Decoded():
                request = self._open[message.request]
                request.tokens = message.tokens
                self._progress("decoded")
                self._close(request)
            case Released():
                request = self._open[message.request]
                request.released = message.reasons
                self._close(request)

    def _send_to_decode(self, message: Prefilled) -> None:
        request = self._open[message.request]
        request.ticket = message.ticket
        self._progress("prefilled")
        self._decode.write(
            line(
                DecodeRequest(
                    request=request.name,
                    prompt_tokens=len(request.prompt),
                    token=message.token,
                    count=self._count,
                    ticket=message.ticket,
                )
            )
        )

    def _close(self, request: Request) -> None:
        if request.tokens and request.released:
            del self._open[request.name]
            self._send_prompts()

    def _send_prompts(self) -> None:
        while self._waiting and len(self._open) < CONCURRENT:
            request = self._waiting.popleft()
            self._open[request.name] = request
            self._prefill.write(line(Prompt(request=request.name, tokens=request.prompt)))
