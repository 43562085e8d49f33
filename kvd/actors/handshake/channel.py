"""What is sent to other daemons. Nothing waits: a message that cannot be sent is lost, as on the network."""

from kvd.actors.handshake.peers import Peers
from kvd.actors.runtime.context import ActorContext
from kvd.net.interface import PeerPort
from kvd.protocol import codec
from kvd.protocol.types import Message


class PeerChannel:
    """Sends to peers that we connect to by their address, and to those that connect to us by their routing id."""

    def __init__(self, context: ActorContext, port: PeerPort, peers: Peers) -> None:
        self._context = context
        self._port = port
        self._peers = peers

    def ask(self, address: str, request: Message) -> None:
        """Sends a request to the peer at `address`; it is lost if there is no link to that peer."""
        peer = self._peers.by_address.get(address)
        if peer is not None:
            peer.needed = self._context.loop.time()
            self._port.ask(peer.link, codec.encode(request))

    def answer(self, sender: bytes, reply: Message) -> None:
        """Answers a peer that connected to us; lost if it is gone."""
        self._port.answer(sender, codec.encode(reply))
