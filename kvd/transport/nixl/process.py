"""The process of the NIXL transport: `python -m kvd.transport.nixl.process AGENT PARENT`, standard input a socket.

Whoever reaches UCX's port reads and writes any address of the process that opened it, and can end it. So that process
is this one. It has the pools mapped and nothing else: no keys, no stamps, no sockets of workers or peers, and of the
environment what NIXL and UCX read. It dies with its daemon, and alone.

NIXL's own teardown has crashed (signal 11) in processes that lost a peer in the middle of a read, so this one ends
without it.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from kvd import foreign
from kvd.errors import BadRequest, ErrorCode, on_error, refusal
from kvd.memory.mapping import Mapping
from kvd.net.stream import Frame, FrameStream
from kvd.processes import die_with
from kvd.transport.interface import Deregistered, Described, PeerAdded, Registered, RegisterFailed
from kvd.transport.nixl import messages
from kvd.transport.nixl.agent_loop import AgentLoop
from kvd.transport.nixl.ucx import UcxEndpoints, failures_of, load_nixl, open_agent

_METHODS: Final[dict[type[messages.Command], str]] = {
    messages.Deregister: "deregister",
    messages.Describe: "describe",
    messages.AddPeer: "add_peer",
    messages.RemovePeer: "remove_peer",
    messages.Abort: "abort",
    messages.Notify: "notify",
    messages.ExpectConnection: "expect_connection",
    messages.ExpectReaders: "expect_readers",
    messages.Ping: "ping",
    messages.Stop: "stop",
}
"""Of the loop; a command has their arguments."""


class _Link:
    """The connection to the daemon."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._events: list[messages.Reported] = []
        self.loop: AgentLoop

    def say(self, message: object) -> None:
        """Sends one frame; if the kernel does not take it now, `commands` goes on with it."""
        self._stream.send(messages.encode(message))

    def emit(self, event: messages.Reported) -> None:
        """Keeps an event for the next frame; those with metadata, which may be long, end theirs."""
        self._events.append(event)
        long = isinstance(event, Registered | Deregistered | Described | PeerAdded)
        if long or len(self._events) == messages.MAX_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Sends the events so far."""
        if self._events:
            events, self._events = self._events, []
            self.say(events)

    def commands(self, seconds: float) -> list[Callable[[], None]] | None:
        """What the daemon asks for; waits so long for something. None if the daemon has ended."""
        readable, writable, _ = select.select(
            [self._stream], [self._stream] if self._stream.waiting else [], [], seconds
        )
        if writable:
            self._stream.flush()
        if not readable:
            return []
        frames = self._stream.receive()
        return None if frames is None else [self._command(frame) for frame in frames]

    def _command(self, frame: Frame) -> Callable[[], None]:
        command = messages.command(frame.content)
        if isinstance(command, messages.Register):
            return partial(self._register, command, frame.descriptors)
        if isinstance(command, messages.Read):
            return partial(self._read, command, frame.descriptors)
        return partial(getattr(self.loop, _METHODS[type(command)]), *msgspec.structs.astuple(command))

    def _register(self, command: messages.Register, descriptors: tuple[int, ...]) -> None:
        """Maps the pool where there is room, and faults it in: the daemon has made its pages."""
        try:
            (descriptor,) = descriptors
            mapping = Mapping(descriptor, command.length)
            with on_error(mapping.close):
                mapping.populate()
        except OSError as error:
            self.emit(
                RegisterFailed(command.pool, f"the transport's process cannot map {command.length} bytes: {error}")
            )
        else:
            self.loop.register(command.pool, command.base, command.size, mapping, command.hidden)
        finally:
            foreign.close(descriptors)

    def _read(self, command: messages.Read, descriptors: tuple[int, ...]) -> None:
        try:
            request = messages.request_of(command, descriptors)
        finally:
            foreign.close(descriptors)
        self.loop.read(request)


def _open(agent: str, link: _Link) -> Any:
    """The agent; None, and the reason said, if UCX does not start."""
    try:
        handle = open_agent(agent)
    except BadRequest as error:
        link.say(messages.NotOpened(error.text))
        return None
    metadata = handle.get_agent_metadata()
    if messages.agent_of(metadata) != agent:
        text = f"this NIXL writes metadata of a form unknown to kvd: {metadata[:64]!r}"
        raise refusal(ErrorCode.INTERNAL, text)
    return handle


def main(agent: str, parent: int) -> None:
    """Serves until the daemon ends."""
    die_with(parent)()  # it ends with its socket, too, unless it hangs
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what they ask for is the daemon's to do
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold the pools, and strangers decide when
    link = _Link(FrameStream(socket.socket(fileno=0)))
    os.dup2(2, 1)  # libraries may print
    handle = _open(agent, link)
    if handle is None:
        return
    endpoints = UcxEndpoints(agent)
    link.loop = AgentLoop(
        handle, failures_of(load_nixl()), endpoints, commands=link.commands, emit=link.emit, flush=link.flush
    )
    link.say(messages.Opened(link.loop.metadata))
    link.loop.run()


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], int(sys.argv[2]))
        status = 0
    except ConnectionError:  # the daemon has ended
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)
