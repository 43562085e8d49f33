"""Caches of other kinds: a prefill on one SGLang and a decode on another give the tokens of a single one."""

import pytest
import pytest_asyncio

from tests.sglang.shared import OTHERS, Compared, Shared
from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.servers import CHUNK, PAGE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.servers import scrape

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TOKENS = 8


@pytest.fixture(scope="module", params=OTHERS)
def model(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="module")
async def served(model: str, shared: Shared) -> Compared:
    return await shared.compared(model)


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
async def test_a_prompt_of_any_length_gives_the_tokens_of_a_single_server(served: Compared, length: int) -> None:
    prompt = make_prompt(length, seed=1000 + length)
    before = (await scrape(served.pair.daemons["decode"])).total("kvd_read_bytes_total")
    wanted = await complete(served.single.url, make_body(prompt, TOKENS))
    assert_same(await served.pair.complete(prompt, TOKENS), wanted)
    assert (await scrape(served.pair.daemons["decode"])).total("kvd_read_bytes_total") > before
