"""`kv_transfer_params`: what routers carry from the prefill engine to the decode engine.

The flags are those of vLLM's other P/D connectors, so routers need not know kvd: a router sends `do_remote_decode` to
the prefill engine and passes the parameters of the answer to the decode engine unchanged.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kvd.engines.identity import checksum
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.limits import MAX_CONSUMERS
from kvd.protocol import ticket as tickets

_COPIED = "remote_request_id"
"""A field of NIXL's that proxies copy which build the decode request's parameters anew: all that is needed is there."""

_SHOWN = 20
"""Characters of a number; whoever reaches an engine may send any."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a decode engine received: the `ticket` for the first `tokens` tokens, or why it is `refused`.

    A refused one has a ticket as well if it can be read, so that its blocks can be let go of.
    """

    ticket: str = field(repr=False)
    tokens: int
    refused: str = ""
    once: bool = False
    """Whether the offer ends when it has been pulled once."""
    grows: bool = False
    """Whether the prefill may still go on, or have to begin."""
    turn: bool = False
    """Whether it is what an earlier turn of the conversation left (`turns`), which may as well be computed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt's cache is made from: all that vLLM's prefix cache tells prompts apart by, but for `cache_salt`.

    A salt keeps users' caches apart that hold the same bytes.
    """

    length: int
    """In tokens."""
    tokens: Sequence[int] | None
    """None for a prompt of embeddings alone."""
    embeddings: Any = None
    """A torch tensor [length, hidden size], if there are any."""
    media: tuple[tuple[str, int], ...] = ()
    """What stands for each image, recording and so on, and where it begins, in tokens: all look alike as tokens."""
    adapter: tuple[str, ...] = ()
    """LoRA's, by its name and, unless they differ between hosts, its path."""

    @classmethod
    def of(cls, request: Any, *, adapter_paths: bool = True) -> Self:
        """The prompt of one of vLLM's requests."""
        lora = request.lora_request
        names = () if lora is None else (lora.lora_name, lora.lora_path)[: 1 + adapter_paths]
        return cls(
            length=request.num_prompt_tokens,
            tokens=request.prompt_token_ids,
            embeddings=request.prompt_embeds,
            media=tuple((item.identifier, item.mm_position.offset) for item in request.mm_features),
            adapter=names,
        )

    def checksum(self, tokens: int) -> int:
        """CRC-32 of what the cache of the first `tokens` tokens is made from."""
        crc = 0 if self.tokens is None else checksum(self.tokens[:tokens])
        if self.embeddings is not None:
            crc = zlib.crc32(_raw(self.embeddings[:tokens]), crc)
        media = tuple(item for item in self.media if item[1] < tokens)
        if media or self.adapter:
            crc = zlib.crc32(repr((media, self.adapter)).encode(), crc)
        return crc

    @property
    def conditions(self) -> str:
        """What both sides must have alike for equal prompts to have equal checksums, if that is not so by itself."""
        text = ""
        if self.media:
            text += "; vLLM names media by hashes: both sides need the same path of the model and the same "
            text += "--mm-hasher-algorithm, and --mm-processor-cache-gb 0 not without a prefix cache"
        if self.adapter:
            text += f"; both sides need the LoRA adapter {' at '.join(self.adapter)}"
        return text


def _raw(tensor: Any) -> Any:
    """The bytes of a tensor."""
    import torch  # noqa: PLC0415 - heavy, and only prompts of embeddings need it

    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def _shown(number: Any) -> str:
    """What is in a number's place, for a log: a text may be of any length, or be a secret that belongs elsewhere."""
    return str(number)[:_SHOWN] if type(number) in (int, float) else f"a {type(number).__name__}"


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
        text = f"kvd_consumers is {_shown(number)}; it must be from 0 (any number) to {MAX_CONSUMERS}"
        raise refusal(ErrorCode.BAD_MESSAGE, text)
    return number


def write(
    ticket: str, tokens: int, prompt: Prompt, consumers: int = 1, *, asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The prefill engine's answer: a `ticket` for the cache of the first `tokens` tokens of `prompt`.

    It is for so many `consumers`. Routers that `asked` with NIXL's fields find all of it in one of those, too.
    """
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvd_prompt": prompt.checksum(tokens),
        "kvd_consumers": consumers,
    }
    if asked is not None and "remote_engine_id" in asked:
        params[_COPIED] = ""
    put_ticket(params, ticket)
    return params


def put_ticket(params: dict[str, Any], ticket: str) -> None:
    """Puts a `ticket` into an answer, in place of that which it has."""
    params["kvd_ticket"] = ticket
    if _COPIED in params:
        params[_COPIED] = f"{ticket}.{params['kvd_prompt']}.{params['kvd_consumers']}"


def _copied(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a proxy has passed on that copies NIXL's fields alone."""
    try:
        ticket, prompt, consumers = params[_COPIED].rsplit(".", 2)
        return {"kvd_ticket": ticket, "kvd_prompt": int(prompt), "kvd_consumers": int(consumers)}
    except (KeyError, AttributeError, ValueError):  # it is not there, no text, or not kvd's
        return {}


def read(params: Mapping[str, Any], prompt: Prompt) -> TransferParams:
    """What the decode engine received for `prompt`.

    A ticket that is missing, unreadable or of another prompt is `refused`. The request then fails like one whose blocks
    could not be loaded: to compute them here instead would hide that the router is wrong.
    """
    if "kvd_ticket" not in params:
        params = _copied(params)
    text = params.get("kvd_ticket")
    if not isinstance(text, str):
        return TransferParams(
            "", prompt.length, "do_remote_prefill without kvd_ticket: does the prefill engine run kvd?"
        )
    try:
        ticket = tickets.decode(text)
    except BadRequest as error:
        return TransferParams("", prompt.length, error.text)
    theirs, ours = params.get("kvd_prompt"), prompt.checksum(ticket.tokens)
    if ticket.tokens > prompt.length or theirs != ours:
        ticket_is = f"the ticket is for {ticket.tokens} tokens with checksum {_shown(theirs)}"
        refused = f"{ticket_is}, this prompt has {prompt.length} and {ours}; does the router mix up requests?"
        return TransferParams(text, prompt.length, refused + prompt.conditions)
    return TransferParams(text, ticket.tokens, once=params.get("kvd_consumers", 1) == 1)
