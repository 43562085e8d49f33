"""What servers of each engine are asked and answer, and how a prefill of one becomes parameters of the other.

vLLM's servers are asked one after the other: the prefill server answers with `kv_transfer_params`, which the decode
server gets. SGLang's meet in a room, whose number both get at once; a prefill there answers only when it has been read.
kvd's adapter for SGLang gives the parameters of a room to who asks its bootstrap server for them, so both kinds are
prefilled first here, and then decoded. SGLang's decode server gets the parameters in place of its prefill server's
name, together with what it takes over from a prefill: the first token, if the prefill server is no SGLang.
"""

import base64
from enum import Enum
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
from yarl import URL

from kvd.errors import ErrorCode, refusal

NULL: Final = msgspec.Raw(b"null")

BOOTSTRAP_PORT: Final = 8998
"""SGLang's default."""

HANDOFF: Final = "kvd1.handoff-"
"""What kvd's adapter for SGLang knows a decode server's parameters by."""

_SGLANG_URL: Final = "sglang"
_TOKEN: Final = "token_id:"  # noqa: S105 - how vLLM writes a token's number in place of its text


class Engine(Enum):
    """What runs on a server."""

    VLLM = "vLLM"
    SGLANG = "SGLang"


class Place(msgspec.Struct, frozen=True):
    """Where a server is: http://host:port; and the port of its bootstrap server, if it is SGLang's."""

    engine: Engine
    url: str
    host: str
    bootstrap_port: int = 0


class Prefilled(msgspec.Struct, frozen=True):
    """What a prefill server has told: its parameters as they are, and the first token if a decode server needs it."""

    params: msgspec.Raw
    first: tuple[int, float, tuple[tuple[int, float], ...]] | None = None


def place(url: str) -> Place:
    """Where a server with this URL is: http://host:port of a vLLM, sglang://host:port?bootstrap=PORT of an SGLang.

    Raises:
        BadRequest: `BAD_CONFIG`, it is no URL of a server.

    """
    try:
        parts = urlsplit(url)
        engine = Engine.SGLANG if parts.scheme == _SGLANG_URL else Engine.VLLM
        asked = parse_qs(parts.query, strict_parsing=bool(parts.query))
        numbers = [int(text) for text in asked.pop("bootstrap", [str(BOOTSTRAP_PORT)])]
        (parts.hostname or "").encode("idna")  # a UnicodeError is a ValueError
        URL(url)  # which requests are made with; what it does not take is a ValueError, too
        valid = parts.scheme in {"http", "https", _SGLANG_URL} and parts.hostname and parts.port != 0
        valid = valid and not (asked or parts.path.strip("/") or parts.fragment)
        valid = valid and len(numbers) == 1 and 0 < numbers[0] < 1 << 16
        valid = valid and (engine is Engine.SGLANG or not parts.query)
        valid = valid and parts.username is None  # a client's Authorization is passed on, and there can be one only
    except ValueError:
        valid = False
    if not valid:
        text = f"{url!r} is no server's URL; it must be like http://host:port, or sglang://host:port?bootstrap=8998"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    scheme = "http" if engine is Engine.SGLANG else parts.scheme
    host = parts.hostname or ""
    return Place(engine, f"{scheme}://{parts.netloc}", host, numbers[0] if engine is Engine.SGLANG else 0)


def room_fields(server: Place, room: int) -> dict[str, Any]:
    """What an SGLang's prefill server is told of a room."""
    return {"bootstrap_host": server.host, "bootstrap_port": server.bootstrap_port, "bootstrap_room": room}


def handed_fields(prefilled: Prefilled, engine: Engine, room: int) -> dict[str, Any]:
    """What a decode server of this engine is told of a prefill; an SGLang's also its room."""
    if engine is Engine.VLLM:
        return {"kv_transfer_params": prefilled.params}
    packed = msgspec.json.encode({"params": prefilled.params, "first": prefilled.first})
    host = HANDOFF + base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return {"bootstrap_host": host, "bootstrap_port": BOOTSTRAP_PORT, "bootstrap_room": room}


class _Likely(msgspec.Struct):
    """A token of a chat, by its number as text."""

    token: str
    logprob: float
    top_logprobs: list["_Likely"] = []


class _Logprobs(msgspec.Struct):
    """Of a completion the first two, of a chat the last."""

    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    content: list[_Likely] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Params(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = NULL


class _Answer(_Params):
    choices: list[_Choice] = []


def prefilled_of(answer: bytes, *, with_token: bool) -> Prefilled | None:
    """What a prefill server's answer tells.

    None if it is no answer, has no parameters, or not the first token, with its number, where that is needed.
    """
    try:
        found: _Params = decode(answer, _Answer if with_token else _Params)
        if not str(found.kv_transfer_params, "utf-8").startswith("{"):  # the decoder has not looked into its strings
            return None
        params = found.kv_transfer_params.copy()
        if not isinstance(found, _Answer):
            return Prefilled(params)
        if not (found.choices and (tokens := found.choices[0].token_ids)):
            return None
        return Prefilled(params, (tokens[0], *_likely(found.choices[0].logprobs)))
    except (msgspec.DecodeError, ValueError):
        return None


def _likely(logprobs: _Logprobs | None) -> tuple[float, tuple[tuple[int, float], ...]]:
    """How likely the first token was, and the likeliest ones with how likely these were."""
    if logprobs is None:
        return 0.0, ()
    if logprobs.content:
        first = logprobs.content[0]
        return first.logprob, _ranked({other.token: other.logprob for other in first.top_logprobs})
    top = logprobs.top_logprobs[0] if logprobs.top_logprobs else None
    return (logprobs.token_logprobs[0] if logprobs.token_logprobs else None) or 0.0, _ranked(top or {})


def _ranked(top: dict[str, float]) -> tuple[tuple[int, float], ...]:
    tokens = [(int(text.removeprefix(_TOKEN)), logprob) for text, logprob in top.items() if text.startswith(_TOKEN)]
    return tuple(sorted(tokens, key=lambda pair: -pair[1]))


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """`data` as `kind`.

    Raises:
        msgspec.DecodeError: It is another one, no JSON, or nested more deeply than this process can follow.

    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
    except UnicodeDecodeError as error:  # of a field's name; values are looked into by servers
        raise msgspec.DecodeError(f"it is no UTF-8: {error.reason}") from error
