"""Encodes and decodes messages. Any bytes either decode to a valid message or raise `BadRequest`."""

from typing import Any, Generic, TypeVar

import msgspec

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.protocol import export, peer, worker
from kvd.protocol.types import Message

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message as one frame.

    Raises:
        BadRequest: `BAD_MESSAGE`, a text in it is not Unicode, as a lone surrogate, a number has more than 64 bits, or
            a value is of another type, as numpy's.

    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise refusal(ErrorCode.BAD_MESSAGE, f"no message: {error}") from error


class Decoder(Generic[T]):
    """Decodes the frames of one kind of sender."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def decode(self, frame: bytes | memoryview) -> T:
        """The message in `frame`.

        Raises:
            BadRequest: `TOO_LARGE` above the bound on a frame, `BAD_MESSAGE` for anything that is not a message.

        """
        if len(frame) > limits.MAX_MESSAGE_BYTES:
            raise refusal(
                ErrorCode.TOO_LARGE, f"message of {len(frame)} bytes, the bound is {limits.MAX_MESSAGE_BYTES}"
            )
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise refusal(ErrorCode.BAD_MESSAGE, f"no message: {error}") from error
        return message

    def try_decode(self, frame: bytes) -> T | None:
        """The message in `frame`; None if it is none."""
        try:
            return self.decode(frame)
        except BadRequest:
            return None


worker_requests: Decoder[worker.Request] = Decoder(worker.Request)
worker_replies: Decoder[worker.Reply] = Decoder(worker.Reply)
session_requests: Decoder[worker.SessionRequest] = Decoder(worker.SessionRequest)
session_replies: Decoder[worker.SessionReply] = Decoder(worker.SessionReply)
peer_requests: Decoder[peer.PeerRequest] = Decoder(peer.PeerRequest)
peer_replies: Decoder[peer.PeerReply] = Decoder(peer.PeerReply)
import_requests: Decoder[export.Import] = Decoder(export.Import)
exports: Decoder[export.Export] = Decoder(export.Export)
export_addresses: Decoder[export.ExportAddress] = Decoder(export.ExportAddress)
