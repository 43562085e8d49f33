from prometheus_client import CollectorRegistry

from kvd.actors.runtime.pace import MAX_CULPRITS
from kvd.daemon.parts import Rejections
from kvd.metrics import Metrics
from kvd.net.trust import Reason, Rejection


class Log:
    def __init__(self):
        self.lines = []

    def warning(self, event, **fields):
        self.lines.append((event, fields))


def count(metrics, reason):
    return metrics.registry.get_sample_value("kvd_peers_rejected_total", {"reason": reason})


def test_every_attempt_is_counted_and_each_key_logged_once():
    metrics, log = Metrics(CollectorRegistry()), Log()
    rejections = Rejections(metrics, log)
    for _ in range(500):
        rejections(Rejection(Reason.UNKNOWN_KEY, "ab" * 32, "10.0.0.7"))
        rejections(Rejection(Reason.UNKNOWN_KEY, "cd" * 32, "10.0.0.8"))
    assert count(metrics, "unknown_key") == 1000
    assert [fields["key"] for _, fields in log.lines] == ["ab" * 32, "cd" * 32]


def test_an_attacker_with_ever_new_keys_fills_neither_memory_nor_log():
    metrics, log = Metrics(CollectorRegistry()), Log()
    rejections = Rejections(metrics, log)
    for number in range(2 * MAX_CULPRITS):
        rejections(Rejection(Reason.UNKNOWN_KEY, f"{number:064x}"))
    assert count(metrics, "unknown_key") == 2 * MAX_CULPRITS
    assert len(log.lines) == MAX_CULPRITS + 1
    assert log.lines[-1][0] == "further ones are counted only"
