"""A client's request, and what servers are sent for it. Fields that the router does not set stay byte for byte."""

import codecs
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec

from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_CONSUMERS
from kvd.router import affinity, limits
from kvd.router.engines import NULL, Engine, Place, Prefilled, decode, handed_fields, room_fields

Fields = dict[str, msgspec.Raw]

_PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
"""What vLLM's P/D connectors are told."""

_NOTHING: Final = msgspec.Raw(b"")
_PROMPT_FIELDS: Final = ("prompt", "prompt_embeds")
"""vLLM computes what both have."""
_TRUE: Final = {b"true", b"1", b"1.0", b"yes", b"on", b"t", b"y"}
"""What vLLM takes for true, with quotation marks or without."""
_LENGTHS: Final = ("max_tokens", "max_completion_tokens")
_NOT_FOR_ONE_TOKEN: Final = {
    "min_tokens",
    "stream_options",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
}
"""Nobody reads the answer: the prompt's logprobs may take gigabytes of it. To stream some of them is refused."""
_LEVELS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""What opens a level as 1, what closes one as -1."""
_NO_LEVELS: Final = bytes(set(range(256)).difference(b'[{]}"'))
_FIRST_LOGPROBS: Final = ("logprobs", "top_logprobs")
"""Those of the first token, which SGLang's decode servers take over from a prefill."""


class Body:
    """The JSON object `data`, with `fields` not decoded further.

    Raises:
        BadRequest: `BAD_MESSAGE`, it is no JSON object, or one that cannot be prefilled here and decoded there;
            `TOO_LARGE`, fields other than prompts and messages have too many bytes or brackets.

    """

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        """In bytes, as it came."""
        try:
            data = data.removeprefix(codecs.BOM_UTF8)  # as vLLM reads it
            _check_size(data)
            self.fields: Fields = decode(data, Fields)
        except msgspec.DecodeError as error:
            raise refusal(ErrorCode.BAD_MESSAGE, f"the body is no JSON object: {error}") from error
        if len(self.fields) > limits.FIELDS:
            text = f"the body has {len(self.fields)} fields; at most {limits.FIELDS} are taken"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        self._check_nesting()
        if bytes(self.fields.pop("kv_transfer_params", NULL)) != bytes(NULL):
            text = "kv_transfer_params is set by the router, which gets it from a prefill server: leave it out"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        self.fields.pop("rid", None)  # a client that leaves would have SGLang end all whose ids begin with its own
        self.choices = 1 if (number := self._field("n", int | None)) is None else number
        """How many completions of the prompt are asked for."""
        if not 1 <= self.choices <= MAX_CONSUMERS:
            text = f"n is {self.choices}; it must be from 1 to {MAX_CONSUMERS}"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        if sum(map(self._count_prompts, _PROMPT_FIELDS)) > 1:
            text = "the body has 2 prompts or more, and a prefill has one: send one request for each"
            raise refusal(ErrorCode.BAD_MESSAGE, text)

    @property
    def for_one_server(self) -> bool:
        """Whether a decode server must compute all of it: vLLM's beam search takes and gives no transfer parameters."""
        return self._is_true("use_beam_search")

    @property
    def streamed(self) -> bool:
        """Whether the client wants each token as it comes."""
        return self._is_true("stream")

    def for_prefill(self, offer: str = "", turn: msgspec.Raw | None = None, *, with_token: bool = False) -> bytes:
        """The same for one token, whose KV blocks are to be offered to every completion's decode: by this name.

        `turn`: the parameters that the conversation's last turn left, a JSON object. `with_token` has the answer tell
        the token, and how likely it is if the client asks for that.
        """
        left: dict[str, Any] = {} if turn is None else decode(turn, Fields)
        params = left | _PREFILL
        params |= {"kvd_consumers": self.choices} if self.choices > 1 else {}
        params |= {"kvd_offer": offer} if offer else {}
        more: dict[str, Any] = {"n": 1} if "n" in self.fields else {}
        more |= {"stream": False, "kv_transfer_params": params}
        if with_token:
            more |= {name: self.fields[name] for name in _FIRST_LOGPROBS if name in self.fields}
            more |= dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), True)
        return self._for_one_token(more)

    def for_room(self, server: Place, room: int) -> bytes:
        """The same for one token, for a prefill server of SGLang's, which tells the decode server of its token."""
        more: dict[str, Any] = {name: self.fields[name] for name in _FIRST_LOGPROBS if name in self.fields}
        return self._for_one_token(more | {"stream": False} | room_fields(server, room))

    def for_turn(self, turn: str) -> bytes:
        """A request for a completion of one token, whose answer has the parameters of what is kept of `turn`."""
        fields: dict[str, Any] = {"model": self.fields["model"]} if "model" in self.fields else {}
        asked = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kvd_turn": turn}}
        return msgspec.json.encode(fields | asked)

    def for_decode(
        self, prefilled: Prefilled | None, engine: Engine = Engine.VLLM, room: int = 1, turn: str = ""
    ) -> bytes:
        """The same with what the prefill server told, unchanged, if it was prefilled.

        `turn` names what a vLLM is to keep for the conversation's next turn.
        """
        if turn and prefilled is not None:
            params = msgspec.json.encode({**decode(prefilled.params, Fields), "kvd_turn": turn})
            prefilled = Prefilled(msgspec.Raw(params), prefilled.first)
        handed = {} if prefilled is None else handed_fields(prefilled, engine, room)
        return msgspec.json.encode(self.fields | handed)

    def for_release(self, prefilled: Prefilled, engine: Engine = Engine.VLLM, room: int = 1) -> bytes:
        """A request whose end lets a prefill server's offer go; it streams, so that its begin can be seen."""
        more = {"temperature": 1} if self.choices > 1 else {}  # greedy, there is one completion only
        return self._for_one_token({**more, "stream": True, **handed_fields(prefilled, engine, room)})

    @cached_property
    def prefixes(self) -> tuple[bytes, ...]:
        """Hashes of beginnings of the prompt (`kvd.router.affinity`), the shortest first."""
        model = bytes(self.fields.get("model", b""))
        chat = self.fields.get("messages")
        # What is between two commas is a message at most.
        if chat is not None and bytes(chat).count(b",") < limits.COMMAS:
            messages = self._field("messages", list[msgspec.Raw] | None) or []
            if len(messages) <= limits.MESSAGES:
                return affinity.of_messages(model, (bytes(message) for message in messages))
        return affinity.of_text(model, memoryview(chat or self.fields.get("prompt", msgspec.Raw(b""))))

    def _for_one_token(self, more: dict[str, Any]) -> bytes:
        fields: dict[str, Any] = {name: self.fields[name] for name in self.fields if name not in _NOT_FOR_ONE_TOKEN}
        fields |= {name: 1 for name in _LENGTHS if name == _LENGTHS[0] or name in fields}
        return msgspec.json.encode(fields | more)

    def _is_true(self, name: str) -> bool:
        return bytes(self.fields.get(name, NULL)).strip(b'"').lower() in _TRUE

    def _check_nesting(self) -> None:
        """Refuses fields in which it takes long to look for their levels, or so deep that a server's engine may die."""
        others = {name: bytes(field) for name, field in self.fields.items() if name not in _Long.__struct_fields__}
        opened = {name: text.count(b"[") + text.count(b"{") for name, text in others.items()}
        if (brackets := sum(opened.values())) > limits.BRACKETS:
            text = f"the fields other than {_LONG_NAMES} have {brackets} opening brackets"
            raise refusal(ErrorCode.TOO_LARGE, f"{text}; at most {limits.BRACKETS} are taken")
        for name, field in others.items():
            if opened[name] > limits.DEPTH and _depth(field) > limits.DEPTH:
                raise refusal(ErrorCode.BAD_MESSAGE, f"{name} is nested too deeply; {limits.DEPTH} levels are taken")

    def _count_prompts(self, name: str) -> int:
        """How many prompts the field has, 2 if more. A list of strings or lists has several, one of token ids one."""
        text = bytes(self.fields.get(name, NULL))
        if not text.startswith(b"["):
            return int(text != bytes(NULL))
        if (first := text[1:].lstrip()[:1]) not in {b'"', b"["}:
            return int(first != b"]")
        return 2 if memoryview(self._field(name, _FirstTwo).second).nbytes else 1

    def _field(self, name: str, kind: Any) -> Any:
        """The field `name` as `kind`, None if it is missing."""
        if name not in self.fields:
            return None
        try:
            return decode(self.fields[name], kind)
        except msgspec.DecodeError as error:
            raise refusal(ErrorCode.BAD_MESSAGE, f"{name}: {error}") from error


def _depth(text: bytes) -> int:
    """Levels of arrays and objects in this JSON. Its values are not decoded: some take a thousand times as long."""
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quotation mark begins or ends a string
    text = text.translate(_LEVELS, _NO_LEVELS).replace(b'""', b"")
    outside = b"".join(text.split(b'"')[::2])
    return max(itertools.accumulate(memoryview(outside).cast("b")), default=0)


class _Long(msgspec.Struct):
    """The fields that may be long."""

    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    prompt_embeds: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING


_LONG_NAMES: Final = ", ".join(_Long.__struct_fields__)


class _FirstTwo(msgspec.Struct, array_like=True):
    """The first two of a list; others are not made."""

    first: msgspec.Raw
    second: msgspec.Raw = _NOTHING


def _check_size(data: bytes) -> None:
    """Refuses what would become very many objects, before it makes them.

    Raises:
        BadRequest: `TOO_LARGE`.
        msgspec.DecodeError: It is no JSON object.

    """
    if len(data) <= limits.FIELDS_BYTES:
        return
    found: _Long = decode(data, _Long)
    others = len(data) - sum(memoryview(field).nbytes for field in msgspec.structs.astuple(found))
    if others > limits.FIELDS_BYTES:
        text = f"the fields other than {_LONG_NAMES} have {others} bytes"
        raise refusal(ErrorCode.TOO_LARGE, f"{text}; at most {limits.FIELDS_BYTES} are taken")


class _Turn(msgspec.Struct):
    kvd_ticket: msgspec.Raw = _NOTHING
    kvd_offer: msgspec.Raw = _NOTHING
    kvd_ttl: float = limits.TURN_SECONDS


def knows_turns(params: msgspec.Raw) -> bool:
    """Whether the servers whose parameters these are may keep turns: whether they run kvd."""
    try:
        said: _Turn = decode(params, _Turn)
    except msgspec.DecodeError:
        return False
    return bool(bytes(said.kvd_ticket) or bytes(said.kvd_offer))


def seconds_of(params: msgspec.Raw) -> float:
    """How long a decode server keeps the turn with these parameters, as far as they say."""
    try:
        kept: float = decode(params, _Turn).kvd_ttl
    except msgspec.DecodeError:
        return 0.0
    return kept


def new_room() -> int:
    """A number under which SGLang's servers meet; 0 is none."""
    return secrets.randbelow((1 << 63) - 1) + 1


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `path` with `body`, and the `headers` that servers get too."""

    path: str
    body: Body
    headers: Mapping[str, str]
    arrived: float
    """Monotonic time."""
    client: str
    """Whose it is, by its address."""
