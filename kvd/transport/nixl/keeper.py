"""Keeps a process of the NIXL transport running: starts it, ends one that hangs or misbehaves, starts the next."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

import structlog

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.transport.interface import Answered, Deregistered, Notified, Registered, RegisterFailed
from kvd.transport.nixl import messages
from kvd.transport.nixl.child import Child
from kvd.transport.nixl.messages import NotOpened, Opened
from kvd.transport.nixl.ucx import set_by_operator
from kvd.transport.on_loop import on_loop

START_SECONDS: Final = 30.0
"""How long the process may take to start: half a second, more on a busy machine."""

STOP_SECONDS: Final = 5.0
"""How long it may go on at the end with slices that are posted: 64 MiB take 10 ms at memory speed, seconds over a bad
network. A process that is killed in the middle of reads has ended those that it read from (signal 11 in UCX)."""

HUNG_PINGS: Final = 25
"""In a row to which it may say nothing. The watchdog sends one a second, and gives a daemon that hangs longer."""

REGISTERED_PER_PING: Final = 256 * limits.MIB
"""Bytes of pools that are being registered for which it may leave one more ping unanswered. Their pages are faulted in
meanwhile, by less than a core where others work, too; for RDMA the device has to pin them as well."""

_SIGNS_OF_LIFE: Final = (Answered, Registered, RegisterFailed, Deregistered)
"""What it says while it gets to no ping, as it registers one large pool after the other."""

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 30.0
"""Seconds before it is started again: twice as long each time, until it has run for `STEADY_SECONDS`."""
STEADY_SECONDS: Final = 60.0

CROWDED_AFTER: Final = 3600.0
"""Seconds after which a process with few free descriptors is replaced. UCX never closes the connection to a peer that
NIXL has forgotten and that lives, so two that meet again have one more (github.com/ai-dynamo/nixl/issues/2025). A
process that is younger needs what it has, and so would the next one."""

_log = structlog.get_logger("kvd.transport")


class Keeper:
    """Starts the first process at once; its agent's `metadata` is then known.

    On the loop it calls `opened(metadata)` when another one takes commands, `heard(event)` for each event, which says
    whether that was asked for, and `ended(how)` when one can write nothing any more. Each has the descriptors `held`.

    Raises:
        BadRequest: `BAD_CONFIG`, UCX does not start; the text names what it was told by the environment.
        OSError: no process can be started.

    """

    def __init__(
        self,
        agent: str,
        loop: asyncio.AbstractEventLoop,
        held: tuple[int, ...],
        *,
        opened: Callable[[bytes], None],
        heard: Callable[[messages.Reported], bool],
        ended: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._loop = loop
        self._held = held
        self._on_opened = opened
        self._on_heard = heard
        self._on_ended = ended
        self._child: Child | None = Child(agent, held)
        self.metadata = self._first_metadata(self._child)
        self.running = True
        """Whether a process takes commands."""
        self._began = loop.time()
        self._pause = FIRST_PAUSE
        self._pings = 0
        """Since its last sign of life."""
        self._registering: dict[int, int] = {}
        """Bytes of the pools that it has yet to register."""
        self._pinged: dict[int, int] = {}
        """Pings that it has not answered, and how many bytes it was told up to each."""
        self._notified = 0
        """Messages of peers in this turn of the loop."""
        self._stopped = False

    @staticmethod
    def _first_metadata(child: Child) -> bytes:
        said = child.open(START_SECONDS)
        if isinstance(said, Opened):
            return said.metadata
        child.kill("")
        how = child.wait()
        child.close()
        if isinstance(said, NotOpened):
            raise refusal(ErrorCode.BAD_CONFIG, said.reason)
        told = set_by_operator(os.environ) or "no variable of UCX's set"
        raise refusal(ErrorCode.INTERNAL, f"NIXL's process did not start with {told}: {how}")

    @property
    def pid(self) -> int | None:
        """The process that there is now; None between two."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Listens to the process."""
        assert self._child is not None  # noqa: S101 - it was started with this object
        self._child.watch(self._loop, self._hear, self._ended)

    def tell(self, command: messages.Command, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a command, if a process takes any.

        Raises:
            Unavailable: `OVERLOADED`, no descriptor is left, or none can be passed.

        """
        if self._child is not None and self.running:
            self._child.send(command, descriptors)
            if isinstance(command, messages.Register):
                self._registering[command.pool] = command.length

    def ping(self, number: int) -> None:
        """Asks a running process for a sign of life, and ends one that gives none for long.

        For one that registers pools the answer is given here: it gets to no ping, and does what it should.
        """
        self._pings += 1
        patience = HUNG_PINGS + sum(self._registering.values()) // REGISTERED_PER_PING
        if self._pings > patience:
            self.accuse(f"it did not answer {patience} pings")
        elif self._registering:
            self._on_heard(Answered(number))
            return
        self.tell(messages.Ping(number))
        if self._child is not None and self.running:
            self._pinged[number] = self._child.told

    def accuse(self, fault: str) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.kill(fault)

    def make_room(self, answer: Answered) -> None:
        """Ends a process through which nobody reads if few addresses are free, or few descriptors and it is old."""
        if answer.few_addresses:
            self.accuse("few addresses are free: pools that have ended have the others")
        elif answer.crowded and self._loop.time() - self._began > CROWDED_AFTER:
            self.accuse("few descriptors are free: peers that were forgotten have the others")

    def stop(self) -> None:
        """Ends the process, in order if it does so in time, and waits for that. On any thread."""
        child = on_loop(self._loop, self._let_go)
        if child is not None:
            child.end_within(STOP_SECONDS)
            on_loop(self._loop, child.close)

    def _let_go(self) -> Child | None:
        """Asks the process to end; it is told nothing more."""
        self._stopped = True
        child, self._child = self._child, None
        if child is not None:
            child.send(messages.Stop(STOP_SECONDS))
        return child

    # --- what it says -----------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Takes in what has come; False if nothing will come any more."""
        child = self._child
        frames = child.receive() if child is not None else None
        if child is None or frames is None:
            return False
        self._notified = 0
        try:
            for frame in frames:
                self._heard(child, frame.content)
        except BadRequest as error:
            child.kill(f"it sent {error.text}")
        return True

    def _heard(self, child: Child, content: bytes) -> None:
        if not self.running:
            self._first_heard(child, messages.first_word(content))
            return
        for event in messages.events(content):
            if self._stopped or child.fault:
                return
            if not messages.is_of_network(event):
                child.kill(f"it told of copies within the host, which it does not make: {type(event).__name__}")
            elif isinstance(event, Notified):
                self._pass_on(event)
            elif not (self._was_asked(child, event) and self._on_heard(event)):
                child.kill(f"it told of what nobody asked for: {type(event).__name__}")
            elif isinstance(event, _SIGNS_OF_LIFE):
                self._pings = 0
                if isinstance(event, Registered | RegisterFailed):
                    self._registering.pop(event.pool, None)

    def _pass_on(self, message: Notified) -> None:
        """Passes a peer's message on, unless there were too many: nobody asked for it, and others wait for the loop."""
        self._notified += 1
        if self._notified <= limits.MAX_NOTIFICATIONS_AT_ONCE:
            self._on_heard(message)

    def _was_asked(self, child: Child, event: messages.Reported) -> bool:
        """Whether an answer is to a ping that the kernel has taken: a process that does not read could guess numbers.

        Of all other events the transport knows.
        """
        if not isinstance(event, Answered):
            return True
        told = self._pinged.get(event.number)
        if told is None or told > child.taken:
            return False
        self._pinged = {number: end for number, end in self._pinged.items() if end > told}
        return True

    def _first_heard(self, child: Child, word: Opened | NotOpened) -> None:
        if isinstance(word, NotOpened):
            child.kill(word.reason)
            return
        self.running = True
        self._on_opened(word.metadata)

    # --- its end, and the next one ----------------------------------------------------------------------------------

    def _ended(self) -> None:
        """No thread of it runs any more."""
        child = self._child
        if child is None or self._stopped:
            return
        child.hang_up()
        while self._hear():  # what it said before its end holds
            pass
        how = child.wait()
        child.close()
        self._child, self.running, self._pings = None, False, 0
        self._pinged.clear()
        self._registering.clear()
        if self._loop.time() - self._began > STEADY_SECONDS:
            self._pause = FIRST_PAUSE
        _log.warning("the transport's process ended", pid=child.pid, how=how, again_in=self._pause)
        self._again()
        self._on_ended(how)

    def _again(self) -> None:
        self._loop.call_later(self._pause, self._start_again)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _start_again(self) -> None:
        if self._stopped:
            return
        self._began = self._loop.time()
        try:
            child = self._child = Child(self._agent, self._held)
        except OSError as error:
            _log.warning("the transport's process cannot be started", reason=str(error), again_in=self._pause)
            self._again()
            return
        child.watch(self._loop, self._hear, self._ended)
        self._loop.call_later(START_SECONDS, self._overdue, child)

    def _overdue(self, child: Child) -> None:
        if self._child is child and not self.running:
            child.kill(f"it did not start within {START_SECONDS:g} s")
