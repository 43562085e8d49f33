"""SIGKILL and SIGSTOP of everybody at each step of a pull: every request ends, and never in wrong bytes.

A pull is held at a step by pausing the producer's daemon: before the handshake, before the claim, or, since a read of
the same host needs only the producer's memory, during the read, so that the fence is not answered (where the lease has
a stamp, that the producer does not hear of the proven read). Over TCP its transport's process is paused, too, which
stalls the read itself. Where a pool is on a GPU, that is held: it begins no copy until the pull is caught reading. Over
TCP it copies into host memory, and out of it.
"""

import contextlib
import signal

import pytest

from tests.support.fleet import Fleet, RemoteError, paused, send, until, without_lease
from tests.support.gpu import MEMORIES, machine_with
from tests.support.transports import transport_of

pytestmark = pytest.mark.real

BLOCKS, BLOCK_BYTES = 1 << 16, 4096
HALF = list(range(0, BLOCKS // 2, 2))
"""No two adjacent: so many descriptors take long enough to be caught in the middle."""
TIMEOUT = 2.0
"""The deadline of a pull, which ends those that nothing else ends. That it does so in time the simulator shows."""
HELD_TIMEOUT = 30.0
"""That of a pull that the GPU holds, and that must be found reading."""
VICTIMS = ("producer-daemon", "consumer-daemon", "producer-worker", "consumer-worker")
STEPS = ("connecting", "claiming", "reading", "fencing", "settling", "done")
WAYS = {
    "messages": ("connecting", "claiming", "reading", "fencing", "done"),
    "stamps": ("reading", "settling"),
    "tcp": ("reading",),
    "gpu": ("reading", "settling"),
    "gpu-messages": ("fencing",),
    "gpu-tcp": ("reading",),
    "gpu-to-host-tcp": ("reading",),
    "host-to-gpu-tcp": ("reading",),
}
"""How leases are proven, and the steps in which that makes a difference."""
ON_GPU = {
    **dict.fromkeys(("gpu", "gpu-messages", "gpu-tcp"), MEMORIES["gpu-to-gpu"]),
    "gpu-to-host-tcp": MEMORIES["gpu-to-host"],
    "host-to-gpu-tcp": MEMORIES["host-to-gpu"],
}
"""The devices of the producer's pools and of the consumer's, where not both are in host memory."""
SAMPLE = {"stamps": ("reading", "settling"), "tcp": ("reading",), "gpu": ("reading",)}
"""What no simulator knows: the memory of dead processes, and reads of it."""


class Stage:
    """Two daemons, their workers and an observer at the consumer; whoever was killed is brought back."""

    def __init__(self, fleet, way, gpu=None):
        self.fleet, self.way, self.gpu = fleet, way, gpu
        self.turn = 0
        # Who is dead or paused is missed, and so are its claims; one thread copies long enough to be caught at it.
        flags = {"heartbeat": "1", "claim_ttl": "5", "copy_threads": "1"}
        start = fleet.far_daemon if way.endswith("tcp") else fleet.daemon
        devices = ON_GPU.get(way, MEMORIES["host-to-host"])
        self.producer, self.consumer = (
            start(name, device=device, **flags) for name, device in zip("pd", devices, strict=True)
        )
        self.prefill = self._worker(self.producer, "prefill")
        self.decode = self._worker(self.consumer, "decode")
        self.observer = fleet.worker(self.consumer, "observer", blocks=1)
        self.recover()

    def _worker(self, daemon, name):
        for _ in until(f"{name} is attached"):
            with contextlib.suppress(RemoteError):
                return self.fleet.worker(daemon, name, blocks=BLOCKS, block_bytes=BLOCK_BYTES)
        raise AssertionError("unreachable")

    def victim(self, name):
        return {
            "producer-daemon": self.producer,
            "consumer-daemon": self.consumer,
            "producer-worker": self.prefill,
            "consumer-worker": self.decode,
        }[name]

    def start_pull(self, before_pull=lambda: None, timeout=TIMEOUT):
        """The blocks of the first half, all of one value, into those of the second half, all zero before."""
        self.turn += 1
        self.value = 1 + self.turn % 250
        self.request = f"r{self.turn}"
        self.target = list(range(BLOCKS // 2, BLOCKS, 2))
        self.prefill.call("fill", ids=HALF, value=self.value)
        self.decode.call("clear")
        ticket = self.prefill.call("offer", name=self.request, ids=HALF)
        if self.way.endswith("messages"):
            ticket = without_lease(ticket)
        before_pull()
        self.decode.call("pull", name=self.request, ticket=ticket, ids=self.target, timeout=timeout)
        self.decode.call("status")  # on the pull's own connection: whoever asks from now on finds the pull, or its end

    def wait_attached(self, worker):
        for _ in until(f"{worker.name} is attached again"):
            with contextlib.suppress(RemoteError):
                worker.call("wait", timeout=0.001)  # which attaches again
                return worker.call("status")
        raise AssertionError("unreachable")

    def wait_for(self, state):
        for _ in until(f"a transfer is {state}"):
            scheduler = self.wait_attached(self.observer)["scheduler"]
            if state == "connecting" and scheduler["connecting"]:
                return True
            if state in scheduler["transfers"]:
                return True
            if not scheduler["pulls"]:
                return False
        raise AssertionError("unreachable")

    def hold_at(self, step, held):
        """Starts a pull and has it wait at `step`; pauses of the producer's daemon go onto `held`."""
        if step in {"connecting", "claiming"}:
            self._hold_before_reading(step, held)
        elif step == "done":
            self.start_pull()
            assert self.decode.outcome(self.request)["kind"] == "Done"
        elif self.gpu:
            self._hold_the_gpu(step, held)
        else:
            self._hold_while_reading(step, held)

    def _hold_before_reading(self, step, held):
        for _ in until(f"a pull is caught {step}"):  # on a busy machine it may be over before anybody looks
            if step == "connecting":
                self.consumer.restart()  # it forgets whom it knew
                for worker in (self.decode, self.observer):
                    self.wait_attached(worker)
            pause = held.enter_context(contextlib.ExitStack())
            self.start_pull(before_pull=lambda pause=pause: pause.enter_context(self.producer.paused()))
            if self.wait_for(step):
                return
            pause.close()
            self.decode.outcome(self.request)

    def _hold_the_gpu(self, step, held):
        self.wait_attached(self.observer)  # which takes the GPU after a restart of its daemon
        for _ in until(f"a pull is caught {step}"):
            hold = held.enter_context(contextlib.ExitStack())
            hold.callback(self.gpu.set, hold=0)
            self.start_pull(before_pull=lambda: self.gpu.set(hold=1), timeout=HELD_TIMEOUT)
            if self.wait_for("reading"):
                hold.enter_context(self.producer.paused())
                if step != "reading":
                    self.gpu.set(hold=0)
                if self.wait_for(step):
                    return
            hold.close()
            self.decode.outcome(self.request)

    def _hold_while_reading(self, step, held):
        for _ in until(f"a pull is caught {step}"):
            transport = transport_of(self.producer) if self.way == "tcp" else None
            self.start_pull()
            if self.wait_for("reading"):
                pause = held.enter_context(contextlib.ExitStack())
                if transport is not None:
                    pause.enter_context(paused(transport))
                pause.enter_context(self.producer.paused())
                if self.wait_for(step):
                    return
                pause.close()
            self.decode.outcome(self.request)

    def recover(self):
        """Brings back who is dead, to the pool that it had, and waits until a pull works again."""
        for daemon in (self.producer, self.consumer):
            if daemon.child.wait(0):
                daemon.start()
        if self.prefill.child.wait(0):
            self.prefill = self._worker(self.producer, "prefill")
            assert self.prefill.attached["kept"]
        if self.decode.child.wait(0):
            self.decode = self._worker(self.consumer, "decode")
            assert self.decode.attached["kept"]
        for _ in until("a pull works again"):
            try:
                self.start_pull()
            except RemoteError as error:
                assert error.code in {"daemon_lost", "overloaded", "not_attached"}  # noqa: PT017
                self.prefill.call("wait", timeout=0.2)
                self.decode.call("wait", timeout=0.2)
                continue
            if self.decode.outcome(self.request)["kind"] == "Done":
                self.check_bytes()
                return

    def check_bytes(self):
        assert self.decode.call("values", ids=self.target) == [self.value] * len(self.target)

    def check_end(self, ended):
        """Done only with the right bytes; and no byte outside of the pull's blocks is touched, whatever it became."""
        if ended["kind"] == "Done":
            self.check_bytes()
        assert self.decode.call("untouched", ids=self.target, value=0)


@pytest.fixture(scope="module", params=WAYS)
def whole_stage(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(machine_with(ON_GPU.get(request.param, ()), folder))
        yield Stage(stack.enter_context(Fleet(folder)), request.param, gpu)


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def stage(whole_stage, held, request):
    """Everything works again after the test: that is a part of it."""
    if request.node.callspec.params["step"] not in WAYS[whole_stage.way]:
        pytest.skip("no such step, or the same as in another way")
    yield whole_stage
    held.close()
    whole_stage.recover()


@pytest.mark.sample(of=lambda whole_stage, victim, step: step in SAMPLE.get(whole_stage, ()))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_request_ends_when_one_is_killed(stage, held, victim, step):
    stage.hold_at(step, held)
    stage.victim(victim).kill()
    if victim != "consumer-worker" and step != "done":
        if victim != "producer-daemon":
            held.close()
        stage.check_end(stage.decode.outcome(stage.request))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_request_ends_when_one_is_stopped(stage, held, victim, step):
    stage.hold_at(step, held)
    child = stage.victim(victim).child
    send(child, signal.SIGSTOP)
    held.callback(send, child, signal.SIGCONT)
    if step != "done":
        if victim == "consumer-worker":  # it can be asked again only when it runs
            for _ in until("the pull has an outcome"):
                scheduler = stage.wait_attached(stage.observer)["scheduler"]
                if scheduler["quarantined"] or not scheduler["pulls"]:
                    break
            held.close()
        stage.check_end(stage.decode.outcome(stage.request))


@pytest.mark.slow
def test_a_read_that_hangs_keeps_its_blocks_in_quarantine_until_it_ends(tmp_path):
    with Fleet(tmp_path) as fleet, contextlib.ExitStack() as held:
        stage = Stage(fleet, "tcp")
        for _ in until("a read hangs"):  # its last bytes may have been under way when the producer was paused
            stage.hold_at("reading", held)
            ended = stage.decode.outcome(stage.request)
            if ended["quarantined"]:
                break
            held.close()
            stage.recover()
        assert (ended["kind"], ended["quarantined"]) == ("Failed", True)
        assert stage.observer.call("status")["scheduler"]["busy_blocks"]["decode"] == len(stage.target)
        held.close()
        for _ in until("the blocks are free"):
            if any(event["kind"] == "Freed" for event in stage.decode.call("wait", timeout=1)):
                break
        stage.recover()
