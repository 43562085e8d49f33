"""The engine's own metrics of its transfers, in its log and on its `/metrics`; the daemon has others."""

from dataclasses import asdict
from statistics import fmean
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvd.engines.vllm.metadata import TransferCounts, TurnCounts

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_BYTES = tuple(2**power for power in range(12, 37, 2))
_BLOCKS = tuple(2**power for power in range(17))


def _nothing() -> dict[str, Any]:
    return asdict(TransferCounts()) | asdict(TurnCounts())


class KvdStats(KVConnectorStats):  # type: ignore[misc]
    """`TransferCounts` and `TurnCounts` on their way to loggers: `data` is a dict of the fields of both."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=_nothing() | (data or {}))

    def reset(self) -> None:
        """Forgets everything counted."""
        self.data = _nothing()

    def aggregate(self, other: KVConnectorStats) -> "KvdStats":
        """Adds the counts of another worker or of a later time."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """The numbers in a line of the log."""
        seconds, nbytes = self.data["pull_seconds"], self.data["pull_bytes"]
        numbers: dict[str, int | float] = {"Pulls": len(seconds)}
        if seconds:
            numbers["Avg pull (ms)"] = round(fmean(seconds) * 1e3, 1)
            numbers["Max pull (ms)"] = round(max(seconds) * 1e3, 1)
            numbers["Avg MB per pull"] = round(fmean(nbytes) / 1e6, 1)
        return numbers | {
            "Failed pulls": self.data["failed_pulls"],
            "Refused offers": self.data["refused_offers"],
            "Expired offers": self.data["expired_offers"],
            "Turns pulled": self.data["turns"].count("pulled"),
            "Turns computed": len(self.data["turns"]) - self.data["turns"].count("pulled"),
        }


class KvdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus metrics of the engine, `vllm:kvd_...`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        seconds = "From the order of a pull to the engine's step that sees its end."
        self._histograms = {
            "pull_seconds": self._histogram("vllm:kvd_pull_seconds", seconds, _SECONDS),
            "pull_blocks": self._histogram("vllm:kvd_pull_blocks", "Blocks of a pull on one rank.", _BLOCKS),
            "pull_bytes": self._histogram("vllm:kvd_pull_bytes", "Bytes of a pull on one rank.", _BYTES),
        }
        failed = "Pulls whose request failed or was recomputed, on each rank."
        refused = "Finished prefills that were not offered, on each rank."
        expired = "Offers that nobody claimed in time, on each rank."
        self._counters = {
            "failed_pulls": self._counter("vllm:kvd_failed_pulls", failed),
            "refused_offers": self._counter("vllm:kvd_refused_offers", refused),
            "expired_offers": self._counter("vllm:kvd_expired_offers", expired),
        }
        text = "Prefills that an earlier turn left something for: pulled, or why it was computed."
        kept = "Answers that are no longer kept for the next turn, and why; or were not kept."
        self._outcomes = {
            "turns": self._outcome("vllm:kvd_turns", text, "outcome"),
            "kept_turns": self._outcome("vllm:kvd_kept_turns", kept, "end"),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one report of an engine."""
        for name, outcomes in self._outcomes.items():
            for outcome in transfer_stats_data[name]:
                outcomes.labels(*self.per_engine_labelvalues[engine_idx], outcome).inc()
        for name, histogram in self._histograms.items():
            for value in transfer_stats_data[name]:
                histogram[engine_idx].observe(value)
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data[name])

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        metric = self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _counter(self, name: str, text: str) -> Any:
        metric = self._counter_cls(name=name, documentation=text, labelnames=self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _outcome(self, name: str, text: str, label: str) -> Any:
        return self._counter_cls(name=name, documentation=text, labelnames=[*self._labelnames, label])
