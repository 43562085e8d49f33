"""Completions of an SGLang server: tokens, and how likely each was."""

from typing import Any, Final

from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError, post

PATH: Final = "/generate"


def make_body(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a request for exactly `tokens` tokens, always the likeliest."""
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **more,
    }


async def complete(url: str, body: dict[str, Any]) -> Completion:
    """The completion of `body`.

    Raises:
        HttpError: There was no good answer, or it has fewer tokens than were asked for.

    """
    answer = await post(url, PATH, body)
    meta = answer["meta_info"]
    found = meta["output_token_logprobs"]
    completion = Completion(
        tokens=answer["output_ids"],
        logprobs=[logprob for logprob, _, _ in found],
        margins=[first[0] - second[0] for first, second in meta["output_top_logprobs"]],
        finish=meta["finish_reason"]["type"],
    )
    if completion.finish != "length" or len(completion.tokens) != body["sampling_params"]["max_new_tokens"]:
        raise HttpError(0, f"{url}: {len(completion.tokens)} tokens, then {meta['finish_reason']}")
    return completion
