"""A process that asks a daemon for its status again and again, as a worker of its own.

For each line that it reads it writes one: the seconds that each status took since the last line, as JSON.
"""

import json
import select
import sys
import time

from kvd.bench.spec import flat_spec
from kvd.client import Worker

_PAUSE = 0.001
"""Seconds between two statuses: less than what is looked for."""


def main() -> None:
    """Runs until the input ends."""
    with Worker.attach(sys.argv[1], name="watcher", spec=flat_spec(16, 16), timeout=60) as worker:
        times: list[float] = []
        while True:
            started = time.perf_counter()
            worker.status()
            times.append(time.perf_counter() - started)
            if select.select([sys.stdin], [], [], _PAUSE)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps(times), flush=True)
                times.clear()


if __name__ == "__main__":
    main()
