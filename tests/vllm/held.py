from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.waiting import until

_OF_DAEMONS = ("kvd_leases_active", "kvd_claims_active", "kvd_pulls_active")
_OF_SERVERS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def held(pair: KvdPair) -> list[str]:
    """What daemons and engines hold for requests, where nobody asks for anything.

    Each engine gets a request of its own: it brings its gauges up to date when it makes steps.
    """
    found = []
    for daemon in pair.daemons.values():
        metrics = await scrape(daemon)
        found += [f"{name} of {daemon.name}" for name in _OF_DAEMONS if metrics.total(name)]
    for server in (pair.prefill, pair.decode):
        await complete(server.url, make_body(server.engine.model, make_prompt(3, seed=0), 2))
        metrics = await scrape(server)
        found += [f"{name} of {server.name}" for name in _OF_SERVERS if metrics.total(name)]
    return found


async def claimed(pair: KvdPair) -> bool:
    """Whether a decode server holds an offer, or reads it."""
    return (await scrape(pair.daemons["prefill"])).total("kvd_claims_active") > 0


async def nothing_is_held(pair: KvdPair) -> None:
    """Returns when nothing is, after every time to live at the latest; TimeoutError, with what still is."""
    found: list[str] = []

    async def none_found() -> bool:
        found[:] = await held(pair)
        return not found

    try:
        await until(none_found)
    except TimeoutError as error:
        raise TimeoutError(f"held for nobody: {', '.join(found)}") from error
