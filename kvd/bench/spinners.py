"""Processes that spin, as engines do that wait for each other: what is measured beside them shares its cores."""

from pathlib import Path

from kvd.processes import Processes


class Spinners(Processes):
    """So many processes that compute without a pause, from the beginning to the end of the `with` block."""

    def __init__(self, count: int, logs: Path) -> None:
        super().__init__(logs)
        self._count = count

    def __enter__(self) -> "Spinners":
        for number in range(self._count):
            self.start(f"spinner-{number}", "kvd.bench.spinners")
        return self


if __name__ == "__main__":
    while True:
        pass
