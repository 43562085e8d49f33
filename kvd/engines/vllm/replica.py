"""A worker whose cache is a copy of another's, which alone is read (prefill context parallelism): it has no daemon."""

from kvd.engines.vllm.metadata import Results, StepMetadata, TransferCounts


class ReplicaSide:
    """Answers as `WorkerSide` does, so that vLLM, which asks all workers, has what the other one says."""

    def __init__(self) -> None:
        self._results = Results()

    def begin(self, metadata: StepMetadata) -> None:
        """A step begins: nothing is read here, and nothing can be brought here."""
        self._results.sent |= {order.request for order in metadata.offers if not order.turn_ttl}
        brought = {order.request for order in metadata.pulls if order.waits}
        self._results.failed |= brought
        self._results.received |= brought

    def launched(self) -> None:
        """The step's kernels are under way."""

    def end(self) -> Results:
        """A step ends."""
        results, self._results = self._results, Results()
        return results

    def changed_endpoint(self) -> None:
        """Consumers do not find this worker."""

    def changed_unsent(self) -> None:
        """Nothing waits to be sent."""

    def take_turn_ends(self) -> list[tuple[str, str]]:
        """Nobody asks for turns here."""
        return []

    def take_counts(self) -> TransferCounts:
        """Nothing was counted."""
        return TransferCounts()

    def close(self) -> None:
        """There is no session."""
