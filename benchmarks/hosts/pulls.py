"""The reading side of `benchmarks.hosts.versions`, run by its path, with the kvd of either checkout.

Each line of its input names a case and how many pulls to make; it answers with their seconds, as JSON.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from kvd.bench.pair import Pair, Place, Pool
from kvd.errors import ErrorCode, InternalError
from kvd.limits import KIB

CASES = {
    "16 KiB": (16 * KIB, 1),
    "1 MiB": (16 * KIB, 64),
    "64 MiB": (256 * KIB, 256),
    "64 MiB in blocks of 16 KiB": (16 * KIB, 4096),
}
"""(bytes of a block, blocks)."""


def check_path(pool: Pool) -> None:
    """Checks that the daemons do not take the namespaces for one host: then they would copy.

    Raises:
        InternalError: they do.

    """
    paths = {peer["path"] for peer in pool.worker.status()["handshake"]}
    if paths != {"tcp/eth0"}:
        raise InternalError(ErrorCode.INTERNAL, f"the daemons read over {paths}, not over the network")


def serve(places: dict[str, Place]) -> None:
    """Answers until the input ends."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder, Pair(Path(folder), places) as pair:
        pools = {
            size: pair.pool(f"blocks-{size}", 64 * KIB * KIB // size, size)
            for size in {size for size, _ in CASES.values()}
        }
        for size, count in CASES.values():
            ids = list(range(count))
            (ticket,) = pools[size].tickets(ids, 1)
            pools[size].pull(ticket, ids)
            pools[size].check(ids, ids)
            check_path(pools[size])
        print(json.dumps([]), flush=True)
        for line in sys.stdin:
            case, times = json.loads(line)
            size, count = CASES[case]
            ids = list(range(count))
            print(json.dumps([pools[size].pull(each, ids) for each in pools[size].tickets(ids, times)]), flush=True)


if __name__ == "__main__":
    within, producer, consumer = sys.argv[1:]
    serve({"producer": Place(tuple(json.loads(within)), producer), "consumer": Place((), consumer)})
    sys.stdout.flush()
    os._exit(0)  # without NIXL's teardown (see `kvd.transport.nixl.process`)
