"""Processes that spin, as engines do while they wait for each other, and so compete for the cores."""

from pathlib import Path

from kvd.processes import Processes


class Spinners(Processes):
    """`count` processes that compute without a pause while the `with` block runs."""

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
