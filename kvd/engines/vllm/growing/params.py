"""`kv_transfer_params` of a request that a router sends to both engines at once.

The router draws a random text for it, `kvd_offer`. The prefill engine opens an offer under a name and a secret that it
makes of that text. The decode engine makes the same ones, and with them the ticket: it is also told `kvd_producer`,
where the prefill engine's daemons are, which any answer of that engine names. So neither waits for a word of the other.

The secret is made of the prompt too. If a router mixes up two requests, the decode engine's claim proves nothing, and
the load fails. It is also made of the number of tokens that the decode engine takes from the prefill engine's cache:
both count them for themselves, and where they do not agree, nothing is loaded.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvd.engines.vllm.metadata import RankEndpoint
from kvd.engines.vllm.transfer_params import Prompt, TransferParams, is_producer
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.limits import MAX_RANKS, SECRET_BYTES
from kvd.protocol import ticket as tickets

_OFFER: Final = re.compile(r"kvdo1\.[A-Za-z0-9_-]{22,58}")
"""At least 128 random bits, and no longer than the key of a BLAKE2b. Logs are searched for how it begins."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The offer of one prompt that a router chose."""

    text: str = field(repr=False)
    name: str
    secret: bytes = field(repr=False)


class _Rank(msgspec.Struct, frozen=True):
    """Where one rank of the prefill engine is."""

    daemon: str
    address: str
    pool: str


_Ranks: TypeAlias = Annotated[list[_Rank], Meta(min_length=1, max_length=MAX_RANKS)]


def is_growing(params: Mapping[str, Any]) -> bool:
    """Whether the request was sent to both engines at once.

    A prefill's ticket, if there is one, says more. The ticket that a prefill engine gets is of an earlier turn.
    """
    return "kvd_offer" in params and ("kvd_ticket" not in params or is_producer(params))


def chosen(params: Mapping[str, Any], prompt: Prompt, tokens: int) -> Chosen:
    """The offer that the router chose for `prompt`, of which the decode engine takes `tokens` tokens.

    Raises:
        BadRequest: `BAD_MESSAGE`, `kvd_offer` is not what a router should draw.

    """
    text = params["kvd_offer"]
    if not isinstance(text, str) or _OFFER.fullmatch(text) is None:
        said = "kvd_offer must be 'kvdo1.' and 22 to 58 random characters of A-Z, a-z, 0-9, _ and -"
        raise refusal(ErrorCode.BAD_MESSAGE, said)
    key = text.encode()
    content = msgspec.msgpack.encode((tokens, prompt.length, prompt.checksum(prompt.length)))
    return Chosen(
        text,
        name=hashlib.blake2b(key, digest_size=16, person=b"kvd offer name").hexdigest(),
        secret=hashlib.blake2b(content, key=key, digest_size=SECRET_BYTES, person=b"kvd offer secret").digest(),
    )


def producer(endpoints: Sequence[RankEndpoint]) -> list[dict[str, str]]:
    """`kvd_producer`: where the ranks of a prefill engine are, in their order."""
    return [{"daemon": rank.daemon, "address": rank.address, "pool": rank.pool} for rank in endpoints]


def write(offer: Chosen, consumers: int) -> dict[str, Any]:
    """The prefill engine's answer but for `kvd_producer`: what the decode engine was told, or another can be told."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvd_offer": offer.text,
        "kvd_consumers": consumers,
    }


def read(params: Mapping[str, Any], prompt: Prompt, tokens: int) -> TransferParams:
    """What the decode engine received for `prompt`, of which it takes `tokens` tokens."""
    try:
        offer = chosen(params, prompt, tokens)
        ranks = msgspec.convert(params.get("kvd_producer"), _Ranks)
        ticket = tickets.join(
            tickets.growing(
                daemon=rank.daemon, address=rank.address, pool=rank.pool, offer=offer.name, secret=offer.secret
            )
            for rank in ranks
        )
    except msgspec.ValidationError as error:
        text = f"kvd_producer: {error}; pass on what an answer of the prefill server names"
        return TransferParams("", prompt.length, text)
    except BadRequest as error:
        return TransferParams("", prompt.length, error.text)
    return TransferParams(ticket, tokens, once=params.get("kvd_consumers", 1) == 1, grows=True)
