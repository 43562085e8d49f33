"""The daemons that connect to us: who they hear that we are, and whom their asks concern."""

from kvd import limits
from kvd.actors.house import House
from kvd.actors.messages import PeerAsks, Pool
from kvd.errors import ErrorCode, KvdError
from kvd.net.interface import PeerAsked, PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import Hello, Ping, Pong, PoolInfo, Refuse, Welcome
from kvd.protocol.types import VERSION, Message
from kvd.transport.interface import Transport


class Reception:
    """What a peer is told of this daemon: who it is, its pools, and the metadata to reach them with."""

    def __init__(self, house: House, port: PeerPort, transport: Transport, stamps: int) -> None:
        self._house = house
        self._port = port
        self._transport = transport
        self._metadata = transport.metadata
        self._stamps = stamps.to_bytes(8, "little")
        self._pools: dict[str, Pool] = {}

    def pool_up(self, pool: Pool, metadata: bytes) -> None:
        """Peers that say hello from now on hear of this pool."""
        self._pools[pool.worker] = pool
        self._metadata = metadata

    def pool_down(self, pool: Pool) -> None:
        """Peers that say hello from now on do not hear of this pool any more."""
        self._pools.pop(pool.worker, None)

    def asked(self, event: PeerAsked) -> None:
        """One ask of a peer: answered here, or passed on to the leases; garbage gets a typed answer."""
        try:
            request = codec.peer_requests.decode(event.frame)
        except KvdError as error:
            self._house.metrics.refused.labels("peer", error.code).inc()
            self._answer(event.sender, Refuse(0, error.code, error.text[: limits.MAX_ERROR_TEXT]))
            return
        match request:
            case Hello():
                self._answer(event.sender, self._reply_to(request))
            case Ping():
                self._answer(event.sender, Pong(request.number, self._house.settings.incarnation))
            case _:
                self._house.leases.tell(PeerAsks(event.sender, request))

    def _answer(self, sender: bytes, message: Message) -> None:
        self._port.answer(sender, codec.encode(message))

    def _reply_to(self, request: Hello) -> Message:
        settings = self._house.settings
        if request.version != VERSION:
            self._house.metrics.refused.labels("peer", ErrorCode.BAD_VERSION).inc()
            text = f"{settings.daemon} speaks version {VERSION} of the protocol, {request.daemon} {request.version}"
            return Refuse(0, ErrorCode.BAD_VERSION, text)
        return Welcome(
            settings.daemon,
            settings.incarnation,
            self._transport.agent,
            self._metadata,
            tuple(
                PoolInfo(pool.worker, pool.epoch, pool.base.to_bytes(8, "little"), pool.size, pool.raw_spec)
                for pool in self._pools.values()
            ),
            host=settings.host,
            stamps=self._stamps,
        )
