"""Prefills that cross engines: what a router carries between an SGLang and an engine of another kind.

Other engines offer a prefill first and are asked to decode it then; SGLang's two servers get a request at once, and
meet in a room. So a decode server here is handed the ticket where it would look for its prefill server, as
`bootstrap_host`, with the first token, which it takes over from a prefill (`read`). And where a prefill server is asked
for rooms, a router gets the ticket of one (`kvd.engines.sglang.desk`), as parameters that other engines take (`write`).
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvd.engines.identity import checksum
from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_TOP_LOGPROBS
from kvd.protocol import ticket as tickets

PREFIX: Final = "kvd1.handoff-"
"""How a host's name begins that is a handoff: as tickets do, so that it is kept out of logs like them."""

HANDED: Final = "handed-by-a-router"
"""The host that stands for all handoffs once they are read."""

_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What a prefill sampled, how likely it was (a natural logarithm), and the likeliest tokens with theirs."""

    token: _Token
    logprob: float = 0.0
    top: Annotated[tuple[tuple[_Token, float], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()


class Params(msgspec.Struct, frozen=True):
    """Of a prefill server's `kv_transfer_params` what is needed here."""

    kvd_ticket: str
    kvd_prompt: int


class Handoff(msgspec.Struct, frozen=True):
    """What a router hands over: the prefill server's parameters, as they are.

    And the first token, unless that is in a record, as where the prefill server is an SGLang.
    """

    params: Params
    first: FirstToken | None = None


def is_handoff(host: str | None) -> bool:
    """Whether a request's `bootstrap_host` is a handoff."""
    return host is not None and host.startswith(PREFIX)


def read(host: str) -> Handoff:
    """The handoff in a request's `bootstrap_host`.

    Raises:
        BadRequest: `BAD_TICKET`, it is none, was cut short, or was read before.

    """
    if host == HANDED:
        text = "a request that a router handed over is prefilled once, and this one was retracted since: send it again"
        raise refusal(ErrorCode.BAD_TICKET, text)
    text = host.removeprefix(PREFIX)
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=Handoff)
    except (binascii.Error, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise refusal(ErrorCode.BAD_TICKET, f"the handoff cannot be read: {error}") from error


def check(handoff: Handoff, prompt: Sequence[int], vocabulary: int) -> None:
    """Checks that it is of this prompt, all of it, and that its tokens are of this vocabulary.

    Raises:
        BadRequest: `BAD_TICKET`, it is not.

    """
    ticket = tickets.decode(handoff.params.kvd_ticket)
    theirs = ticket.tokens, handoff.params.kvd_prompt
    if theirs != (len(prompt), checksum(prompt)):
        text = "the ticket is for {} tokens with checksum {}, this prompt has ".format(*theirs)
        text += f"{len(prompt)} and {checksum(prompt)}: does the router mix up requests, or the chat template differ?"
        raise refusal(ErrorCode.BAD_TICKET, text)
    first = handoff.first
    for token in () if first is None else (first.token, *(token for token, _ in first.top)):
        if token >= vocabulary:
            raise refusal(ErrorCode.BAD_TICKET, f"token {token} is not one of the {vocabulary} of this model")


def write(ticket: str, prompt: int) -> dict[str, Any]:
    """The parameters for an engine that decodes what an SGLang has prefilled, of a prompt with this checksum."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvd_ticket": ticket,
        "kvd_prompt": prompt,
        "kvd_consumers": 1,
    }
