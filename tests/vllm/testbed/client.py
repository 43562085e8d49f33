"""Completions of a vLLM server: tokens, how likely each was, and when each arrived."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tests.vllm.testbed.http import HttpError, post, request

PATH: Final = "/v1/completions"


@dataclass(slots=True)
class Completion:
    """What a server made of a prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, natural logarithm."""
    margins: list[float] = field(default_factory=list)
    """How much likelier, as a logarithm, each token was than the next best one."""
    times: list[float] = field(default_factory=list)
    """When each token arrived, by `time.perf_counter`."""
    finish: str | None = None
    """Why it ended: `length`, or what vLLM says of an error."""

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def make_body(model: str, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a request for exactly `tokens` tokens, always the likeliest."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        **more,
    }


def prefill_body(body: dict[str, Any], **more: object) -> dict[str, Any]:
    """What a router sends to the prefill side: the same request for one token, its KV to be kept for others."""
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        **more,
    }
    return body | {"max_tokens": 1, "stream": False, "kv_transfer_params": asked}


async def prefill(url: str, body: dict[str, Any], **more: object) -> dict[str, Any]:
    """Prefills at `url`, asked with `more` parameters, and returns those of the answer, to be passed on unchanged.

    Raises:
        HttpError: There was no good answer, or it has no such parameters.

    """
    answer = await post(url, PATH, prefill_body(body, **more))
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise HttpError(200, f"{url}: the answer of the prefill side has no kv_transfer_params")
    return params


async def complete(
    url: str,
    body: dict[str, Any],
    into: Completion | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Completion:
    """Sends `body` and reads the tokens as they come, into `into` where somebody watches.

    Raises:
        HttpError: There was no good answer, or it broke off, or it has fewer tokens than were asked for.

    """
    completion = into or Completion()
    async with request(url, PATH, body | {"stream": True}, headers) as response:
        if response.status != 200:
            raise HttpError(response.status, (await response.read()).decode(errors="replace"))
        async for event in response.events():
            if "error" in event:
                code = event["error"].get("code")  # of the router a word: then the server said nothing
                raise HttpError(code if isinstance(code, int) else 0, str(event["error"].get("message")))
            _add(completion, event["choices"], time.perf_counter())
    if completion.finish != "length":
        raise HttpError(
            0, f"{url}: the completion ended with {completion.finish!r} after {len(completion.tokens)} tokens"
        )
    return completion


def _add(completion: Completion, choices: list[dict[str, Any]], now: float) -> None:
    for choice in choices:
        tokens = choice.get("token_ids") or []
        completion.tokens += tokens
        completion.times += [now] * len(tokens)
        logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
        completion.logprobs += logprobs["token_logprobs"]
        for best in logprobs["top_logprobs"]:
            first, second = sorted(best.values(), reverse=True)[:2]
            completion.margins.append(first - second)
        completion.finish = choice.get("finish_reason") or completion.finish
