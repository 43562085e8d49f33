"""`kv_transfer_params`: what routers carry from the prefill engine to the decode engine.

The flags are those of vLLM's other P/D connectors, so routers need not know kvd: a router sends `do_remote_decode` to
the prefill engine and passes the parameters of the answer to the decode engine unchanged.
"""

import array
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.errors import BadRequest, ErrorCode
from kvd.limits import MAX_CONSUMERS
from kvd.protocol import ticket as tickets


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a decode engine received: the `ticket` for the first `tokens` tokens, or why it is `refused`.

    A refused one has a ticket as well if it can be read, so that its blocks can be let go of.
    """

    ticket: str = field(repr=False)
    tokens: int
    refused: str = ""


def is_producer(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will decode this request."""
    return bool(params and params.get("do_remote_decode"))


def is_consumer(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine has prefilled this request."""
    return bool(params and params.get("do_remote_prefill"))


def consumers(params: Mapping[str, Any]) -> int:
    """How many decode requests will use the ticket: `kvd_consumers`, 1 unless given.

    A router that gives one prefill to several requests (sampling with n > 1) sets it, to 0 for any number.

    Raises:
        BadRequest: `BAD_MESSAGE`, for any other value.

    """
    number = params.get("kvd_consumers", 1)
    if type(number) is not int or not 0 <= number <= MAX_CONSUMERS:
        text = f"kvd_consumers is {number!r}; it must be from 0 (any number) to {MAX_CONSUMERS}"
        raise BadRequest(ErrorCode.BAD_MESSAGE, text)
    return number


def write(ticket: str, tokens: int, prompt: Sequence[int] | None) -> dict[str, Any]:
    """The prefill engine's answer: a `ticket` for the cache of the first `tokens` tokens of `prompt`."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvd_ticket": ticket,
        "kvd_prompt": _checksum(prompt, tokens),
    }


def read(params: Mapping[str, Any], prompt: Sequence[int] | None, prompt_tokens: int) -> TransferParams:
    """What the decode engine received for a prompt of `prompt_tokens` tokens.

    A ticket that is missing, unreadable or of another prompt is `refused`. The request then fails like one whose blocks
    could not be loaded: to compute them here instead would hide that the router is wrong.
    """
    text = params.get("kvd_ticket")
    if not isinstance(text, str):
        return TransferParams(
            "", prompt_tokens, "do_remote_prefill without kvd_ticket: does the prefill engine run kvd?"
        )
    try:
        ticket = tickets.decode(text)
    except BadRequest as error:
        return TransferParams("", prompt_tokens, error.text)
    theirs, ours = params.get("kvd_prompt"), _checksum(prompt, ticket.tokens)
    if ticket.tokens > prompt_tokens or theirs != ours:
        ticket_is = f"the ticket is for {ticket.tokens} tokens with checksum {theirs}"
        refused = f"{ticket_is}, this prompt has {prompt_tokens} and {ours}; does the router mix up requests?"
        return TransferParams(text, prompt_tokens, refused)
    return TransferParams(text, ticket.tokens)


def _checksum(prompt: Sequence[int] | None, tokens: int) -> int:
    """CRC-32 of the first `tokens` token ids; 0 for a prompt of embeddings."""
    return 0 if prompt is None else zlib.crc32(array.array("q", prompt[:tokens]).tobytes())
