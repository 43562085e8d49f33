"""One daemon on a virtual loop, its ports and transport played by the test."""

from prometheus_client import CollectorRegistry

from kvd.actors.build import Dependencies, build_actors
from kvd.actors.gateway.admission import Policy
from kvd.actors.handshake.introductions import anybody
from kvd.actors.handshake.peer_server import everything
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.settings import Settings
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.metrics import Metrics
from kvd.net.interface import (
    PeerAnswered,
    PeerAsked,
    ProcessEnded,
    SessionClosed,
    SessionFrame,
    SessionOpened,
    WorkerFrame,
)
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Ping, Pong, PoolInfo, Welcome
from kvd.protocol.ticket import Ticket, TicketRank, proof
from kvd.protocol.types import VERSION, Span
from kvd.protocol.worker import Attach, Notifications, Offer, Pull
from kvd.transport.interface import Deregistered, Described, Landed, PeerAdded, ReadFailed, Registered
from tests.simulator.virtual.cache import make_cache
from tests.simulator.virtual.loop import VirtualLoop
from tests.simulator.virtual.memory import SimStamps
from tests.support.nameless import Nameless
from tests.support.statuses import process_status

CACHE = make_cache("flash-hnd", 0, 1, num_blocks=8, block_tokens=2, groups=1)
INCARNATION = 1 << 20
STAMPS = 1 << 40
PEER_STAMPS = 1 << 41
SECRET = b"a secret of a lease"[:16]


def ids(*blocks):
    return b"".join(block.to_bytes(4, "little") for block in blocks)


class Memory:
    backing = "plain"
    device = ""

    def __init__(self, size, descriptor=7):
        self.base = 1 << 32
        self.size, self.length, self.descriptor, self.closed = size, size, descriptor, False

    def move(self):
        self.base += 1 << 32

    def close(self):
        self.closed = True

    free = close


class Stage:
    """Everything outside the actors; `sent` and `asked` hold what they said."""

    def __init__(self, rights=everything, speaks_for=anybody, rules=(), **settings):
        self.loop = VirtualLoop()
        self.failures = []
        self.to_workers, self.on_sessions, self.to_peers, self.answers = [], [], [], []
        self.commands, self.discarded, self.hung_up, self.idle = [], [], [], []
        self.room, self.memory = True, Memory(CACHE.spec.pool_bytes)
        self.reads = []
        """What the transport was asked to read."""
        self.forgotten = []
        """Sessions whose process is not watched any more."""
        self.same_host = False
        """Whether peers are on this host."""
        self.stamps_readable = True
        """Whether their stamps can be read, if they are."""
        self.conditions, self.notes = {}, {}
        self.context = ActorContext(
            loop=self.loop,
            settings=Settings(daemon="d", incarnation=INCARNATION, **settings),
            metrics=Metrics(CollectorRegistry()),
            supervisor=self,
            condition=self.conditions.__setitem__,
            idle=self.idle.append,
            note=lambda name, text, seconds: self.notes.__setitem__(name, (text, seconds)),
        )
        self.dependencies = Dependencies(
            worker_port=_WorkerPort(self),
            peer_port=_PeerPort(self),
            transport=_Transport(self),
            provider=_Provider(self),
            background=_at_once,
            pool_background=_at_once,
            draw_session=self._draw,
            describe=lambda: process_status("d"),
            transport_died=self.failures.append,
            policy=Policy(1000, rules),
            stamps=SimStamps(lambda _words: STAMPS),
            rights=rights,
            speaks_for=speaks_for,
        )
        self.sessions = 0
        self.actors = build_actors(self.context, self.dependencies)

    def _draw(self):
        self.sessions += 1
        return bytes([self.sessions]) * 16

    def failed(self, actor, message, error):
        self.failures.append((actor.name, error))

    def run(self, seconds=0.0):
        self.loop.run_until(self.loop.now + seconds)
        assert not self.failures, self.failures

    def stand_still(self, seconds):
        """This daemon gets no processor; then its timers run, before it reads what lies in its sockets."""
        self.loop.stand_still(seconds)
        self.run()

    # --- workers

    def connect(self, connection=1, pid=1, watched=True, uid=1000):
        self.actors.gateway.received(SessionOpened(connection, pid, uid, uid, watched))
        self.run()

    def session(self, message, connection=1, descriptors=()):
        frame = message if isinstance(message, bytes) else codec.encode(message)
        self.actors.gateway.received(SessionFrame(connection, frame, descriptors))
        self.run()
        return self.on_sessions[-1] if self.on_sessions else None

    def hang_up(self, connection=1):
        self.actors.gateway.received(SessionClosed(connection))
        self.run()

    def process_ends(self, connection=1):
        self.actors.gateway.received(ProcessEnded(connection))
        self.run()

    def attach(self, name="w", connection=1, instance=b"i" * 16, descriptors=(), raw=CACHE.raw, **process):
        self.connect(connection, **process)
        return self.session(Attach(name, instance, raw), connection, descriptors)

    def request(self, message, session=b"\1" * 16):
        frame = message if isinstance(message, bytes) else codec.encode(message)
        before = len(self.to_workers)
        self.actors.gateway.received(WorkerFrame(session, frame, 1000))
        self.run()
        return [reply for _, reply in self.to_workers[before:]]

    def offer(self, name="o", blocks=(0, 1), ttl=30.0, call=1, consumers=1):
        return self.request(Offer(call, name, 4, (Span(0, 0, ids(*blocks)),), ttl, SECRET, consumers))

    def pull(self, name="p", blocks=(2, 3), timeout=5.0, ticket=None, call=2, offered=(0, 1)):
        text = make_ticket(blocks=offered) if ticket is None else ticket
        return self.request(Pull(call, name, text, (Span(0, 0, ids(*blocks)),), timeout))

    @property
    def notified(self):
        return [item for _, reply in self.to_workers if isinstance(reply, Notifications) for item in reply.items]

    # --- peers

    def asked_by_peer(self, message, sender=b"peer", key=""):
        frame = message if isinstance(message, bytes) else codec.encode(message)
        before = len(self.answers)
        self.dependencies.peer_port.on_event(PeerAsked(sender, frame, key))
        self.run()
        return [reply for _, reply in self.answers[before:]]

    def peer_says(self, message, link=1):
        frame = message if isinstance(message, bytes) else codec.encode(message)
        self.dependencies.peer_port.on_event(PeerAnswered(link, frame))
        self.run()

    def pongs(self, incarnation, link=1, starts=0):
        """A heartbeat later a peer answers the last ping."""
        self.run(1.0)
        number = [message.number for to, message in self.to_peers if to == link and isinstance(message, Ping)][-1]
        self.peer_says(Pong(number, incarnation, starts), link)

    def asks(self, kind):
        return [message for _, message in self.to_peers if isinstance(message, kind)]

    # --- the transport

    def landed(self, read):
        self.transport_says(Landed(read, 0.01))

    def read_failed(self, read):
        self.transport_says(ReadFailed(read, "broken"))

    def transport_says(self, event):
        self.dependencies.transport.on_event(event)
        self.run()


def _at_once(work, done):
    try:
        result = work()
    except KvdError as error:
        result = error
    done(result)


def make_ticket(
    pool="there", offer="o", blocks=(0, 1), address="tcp://peer:1", incarnation=0, raw_ids=None, daemon="peer"
):
    rank = TicketRank(daemon, address, incarnation, pool, offer, 0, SECRET)
    return Ticket(4, (rank,), ((Span(0, 0, ids(*blocks) if raw_ids is None else raw_ids),),)).encode()


def make_claim(
    number=1,
    *,
    pool="w",
    offer="o",
    blocks=(0, 1),
    secret=SECRET,
    incarnation=INCARNATION,
    generation=0,
    consumer="c",
    reader=0,
    readers=1,
    ttl=5.0,
    **more,
):
    shown = proof(secret, pool, offer, 4, (Span(0, 0, ids(*blocks)),))
    return Claim(number, pool, offer, incarnation, generation, shown, consumer, reader, readers, ttl, **more)


class _WorkerPort:
    endpoint = "ipc://x"

    def __init__(self, stage):
        self.stage = stage

    def start(self, on_event, intake):
        pass

    def send_session(self, connection, frame, descriptors=()):
        self.stage.on_sessions.append(codec.session_replies.decode(frame))

    def close_session(self, connection):
        self.stage.hung_up.append(connection)

    def forget_process(self, connection):
        self.stage.forgotten.append(connection)

    def discard(self, descriptors):
        self.stage.discarded += descriptors

    def send(self, session, frame):
        if self.stage.room:
            self.stage.to_workers.append((session, codec.worker_replies.decode(frame)))
        return self.stage.room

    def close(self):
        pass


class _PeerPort(Nameless):
    address = "tcp://self:1"

    def __init__(self, stage):
        self.stage, self.links = stage, {}

    def start(self, on_event, intake):
        self.on_event = on_event

    def connect(self, address, party=""):
        if not address.startswith("tcp://"):
            raise BadRequest(ErrorCode.BAD_TICKET, f"no address: {address}")
        self.links[len(self.links) + 1] = address
        return len(self.links)

    def ask(self, link, frame):
        self.stage.to_peers.append((link, codec.peer_requests.decode(frame)))
        return True

    def answer(self, sender, frame):
        self.stage.answers.append((sender, codec.peer_replies.decode(frame)))
        return True

    def disconnect(self, link):
        self.stage.commands.append(("disconnect", link))

    def close(self):
        pass


class _Provider:
    device = ""

    def __init__(self, stage):
        self.stage = stage

    def footprint(self, size):
        return size

    def allocate(self, name, size):
        return self.stage.memory

    def adopt(self, descriptor, size):
        self.stage.commands.append(("adopt", descriptor))
        return self.stage.memory


class _Transport:
    agent, metadata = "d#1", b"meta"

    def __init__(self, stage):
        self.stage = stage

    def start(self, on_event):
        self.on_event = on_event

    def register(self, pool, region):
        self.on_event(Registered(pool, b"meta"))

    def deregister(self, pool, *, returns):
        self.stage.commands.append(("deregister for a while" if returns else "deregister", pool))
        self.on_event(Deregistered(pool, b"meta"))

    def describe(self, pools):
        self.stage.commands.append(("describe", pools))
        self.on_event(Described(pools, repr(pools).encode()))

    def add_peer(self, agent, metadata, address=""):
        near = self.stage.same_host
        self.on_event(PeerAdded(agent, metadata, same_host=near, stamps=near and self.stage.stamps_readable))

    def remove_peer(self, agent):
        self.stage.commands.append(("remove_peer", agent))

    def read(self, request):
        self.stage.commands.append(("read", request.read))
        self.stage.reads.append(request)

    def abort(self, read):
        self.stage.commands.append(("abort", read))

    def expect_connection(self):
        self.stage.commands.append(("expect_connection",))

    def expect_readers(self, expected):
        self.stage.commands.append(("expect_readers", expected))

    def stop(self):
        pass


def welcome_of(pools=("there",), incarnation=5, epoch=1, version=VERSION):
    infos = tuple(PoolInfo(pool, epoch, bytes(8), CACHE.spec.pool_bytes, CACHE.raw) for pool in pools)
    stamps = PEER_STAMPS.to_bytes(8, "little")
    return Welcome("peer", incarnation, "peer#1", b"m", infos, version, stamps=stamps)
