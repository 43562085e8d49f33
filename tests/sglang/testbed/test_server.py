"""A server of the test bed computes what the model's own code computes, so tests can take its tokens for true ones."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.servers import CHUNK, PAGE, Engine, Server
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.service import start_all, stop_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    server = Server("single", tmp_path_factory.mktemp("single"), Engine(models, "llama"))
    try:
        await start_all([server])
        yield server
    finally:
        stop_all([server])


@pytest.fixture(scope="module")
def reference(models: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # where SGLang is

    return AutoModelForCausalLM.from_pretrained(models / "llama").eval()


@pytest.mark.parametrize("length", [1, PAGE, CHUNK + 1, 3 * CHUNK + 5])
async def test_a_server_gives_the_tokens_of_transformers(single: Server, reference: Any, length: int) -> None:
    import torch  # noqa: PLC0415  # where SGLang is

    prompt = make_prompt(length, seed=length)
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    expected = reference.generate(torch.tensor([prompt]), **greedy)[0, length:].tolist()
    assert (await complete(single.url, make_body(prompt, NEW))).tokens == expected
