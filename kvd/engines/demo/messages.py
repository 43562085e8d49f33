"""Messages between the demo's router and its two engines: JSON, one per line."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an engine's process. Every rank's pool has `num_blocks` blocks of `block_tokens` tokens."""

    name: str
    socket: str
    layout: str
    tp_size: int
    block_tokens: int
    num_blocks: int
    seed: int


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages; the class name is the tag."""


# --- to the prefill engine ------------------------------------------------------------------------------------------


class Prompt(Message, frozen=True):
    """Prefill these tokens and offer their blocks."""

    request: str
    tokens: list[int]


# --- to the decode engine -------------------------------------------------------------------------------------------


class DecodeRequest(Message, frozen=True):
    """Pull the KV of `prompt_tokens` tokens with `ticket`; continue from `token` until there are `count` tokens."""

    request: str
    prompt_tokens: int
    token: int
    count: int
    ticket: str


# --- to both --------------------------------------------------------------------------------------------------------


class Stop(Message, frozen=True):
    """Return the pools and exit."""


# --- from both ------------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The pools are attached; requests may come."""


class Failed(Message, frozen=True):
    """A request has failed."""

    request: str
    text: str


# --- from the prefill engine ----------------------------------------------------------------------------------------


class Prefilled(Message, frozen=True):
    """The first token, and the ticket of the blocks that hold the prompt's KV."""

    request: str
    token: int
    ticket: str


class Released(Message, frozen=True):
    """Every rank's offer was released and the blocks are free; `reasons` has an entry for each rank."""

    request: str
    reasons: list[str]


# --- from the decode engine -----------------------------------------------------------------------------------------


class Pulled(Message, frozen=True):
    """Every rank's `blocks` are there. The times are of the monotonic clock, in seconds."""

    request: str
    blocks: list[int]
    started: float
    ended: float


class Decoded(Message, frozen=True):
    """All tokens of a request, the first from the prefill engine."""

    request: str
    tokens: list[int]


ToPrefill = Prompt | Stop
ToDecode = DecodeRequest | Stop
FromEngine = Ready | Failed | Prefilled | Released | Pulled | Decoded
