"""`kv_transfer_params` between the turns of a conversation: what a decode engine keeps, the next prefill may pull.

The next prompt begins with this turn's prompt and answer, as far as chat template and tokenizer give them back:
reasoning may be cut out, and text may be tokenized otherwise than it was sampled. That is no error, unlike a prefill's
ticket for another prompt. So the parameters have hashes of several beginnings. The prefill engine pulls the longest one
that its prompt has, and computes the rest.

A router names a turn for the decode engine (`kvd_turn`) and asks for its parameters by that name when the answer has
ended: vLLM gives no parameters in answers that it streams, and tickets are not for clients. With `"kvd_turn": true`
they are in the answer itself, as in those of vLLM's NixlConnector.
"""

import array
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvd.engines.vllm.transfer_params import Prompt, TransferParams
from kvd.errors import BadRequest
from kvd.limits import MAX_REQUEST_ID_BYTES, MAX_TURN_PREFIXES
from kvd.protocol import ticket as tickets

logger = logging.getLogger(__name__)

_Length = Annotated[int, Meta(gt=0, lt=1 << 40)]


class _Turn(msgspec.Struct):
    """What a prefill engine reads."""

    kvd_ticket: str
    kvd_prefixes: Annotated[tuple[tuple[_Length, str], ...], Meta(max_length=MAX_TURN_PREFIXES)]


def name_of(params: Mapping[str, Any] | None) -> str:
    """The name of the turn that a decode engine is to keep, or that is asked for; empty if there is none."""
    name = (params or {}).get("kvd_turn")
    return name if isinstance(name, str) and len(name.encode(errors="replace")) <= MAX_REQUEST_ID_BYTES else ""


def in_answer(params: Mapping[str, Any] | None) -> bool:
    """Whether a decode engine is to keep the turn and to say so in its answer."""
    return (params or {}).get("kvd_turn") is True


def is_turn(params: Mapping[str, Any] | None) -> bool:
    """Whether a request for a prefill engine names what an earlier turn left."""
    return bool(params and params.get("do_remote_decode") and params.get("kvd_ticket"))


def write(ticket: str, tokens: int, sequence: Prompt, ttl: float) -> dict[str, Any]:
    """The parameters of a turn: a `ticket` for the first `tokens` tokens of `sequence`, a prompt and its answer.

    The flags are those with which a router sends them to a prefill engine. `sequence.length` is the prompt's.
    """
    lengths = _lengths(min(sequence.length, tokens), tokens)
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "kvd_ticket": ticket,
        "kvd_prefixes": list(zip(lengths, digests(sequence, lengths), strict=True)),
        "kvd_ttl": ttl,
    }


def read(params: Mapping[str, Any], prompt: Prompt, *, whole: bool) -> TransferParams:
    """What `prompt` may pull of an earlier turn: of its ticket the first tokens, 0 if the prompt begins otherwise.

    `whole`: all of it or nothing, and then at least a token of the prompt must be left to compute.
    """
    try:
        turn = msgspec.convert(params, _Turn)
        ticket = tickets.decode(turn.kvd_ticket)
    except (msgspec.ValidationError, BadRequest) as error:
        logger.warning("what an earlier turn left cannot be read, and is computed: %s", error)
        return TransferParams("", 0, turn=True)
    most = min(ticket.tokens, prompt.length - whole)
    prefixes = sorted(prefix for prefix in turn.kvd_prefixes if prefix[0] <= most)
    ours = digests(prompt, [length for length, _ in prefixes])
    common = [length for (length, theirs), own in zip(prefixes, ours, strict=True) if theirs == own]
    tokens = max(common, default=0)
    if whole and tokens < ticket.tokens:
        tokens = 0
    return TransferParams(turn.kvd_ticket, tokens, once=True, turn=True)


def digests(prompt: Prompt, lengths: Sequence[int]) -> Iterator[str]:
    """A hash, 16 bytes in hexadecimal, of what the caches of these beginnings are made from; `lengths` ascend.

    Prompts that differ are usual here, so equal hashes of different ones must not happen: a checksum would not do.
    """
    tokens = prompt.tokens or ()
    read = hashlib.blake2b(digest_size=16, person=b"kvd turn")
    done = 0
    for length in lengths:
        read.update(array.array("q", tokens[done:length]).tobytes())
        done = length
        whole = read.copy()
        media = tuple(item for item in prompt.media if item[1] < length)
        whole.update(repr((length, media, prompt.adapter, prompt.embeddings is None)).encode())
        yield whole.hexdigest()


def _lengths(prompt: int, tokens: int) -> list[int]:
    """Beginnings that the next prompt may share: the prompt, and within the answer at even distances."""
    step = max(1, -(-(tokens - prompt) // (MAX_TURN_PREFIXES - 1)))
    return [prompt, *reversed(range(tokens, prompt, -step))]
