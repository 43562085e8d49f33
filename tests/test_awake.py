"""Cores that are kept awake, on a kernel made of files; against the real one, `tests/e2e/test_pauses.py`."""

import array
from pathlib import Path

import pytest

from kvd.awake import Cores, shallowest
from kvd.doctor.cores import check_cores
from kvd.doctor.finding import Level

UNBOUND = 2_000_000_000


def kernel(cpus: Path, driver: str, *states: tuple[str, int]) -> Path:
    (cpus / "cpuidle").mkdir()
    (cpus / "cpuidle/current_driver").write_text(f"{driver}\n")
    for number, (name, latency) in enumerate(states):
        state = cpus / f"cpu0/cpuidle/state{number}"
        state.mkdir(parents=True)
        (state / "name").write_text(f"{name}\n")
        (state / "latency").write_text(f"{latency}\n")
    return cpus


def written(device: Path) -> list[int]:
    return list(array.array("i", device.read_bytes()))


@pytest.mark.parametrize(
    ("driver", "states", "expected"),
    [
        ("intel_idle", [("POLL", 0), ("C1", 2), ("C6", 133)], 2),
        ("acpi_idle", [("POLL", 0), ("C2", 18), ("C1", 1)], 1),
        ("psci_idle", [("WFI", 1), ("cpu-sleep-0", 700)], 1),
        ("haltpoll", [("POLL", 0), ("haltpoll idle", 1)], 0),
    ],
)
def test_cores_are_kept_in_the_shallowest_state_that_saves_power(
    tmp_path: Path, driver: str, states: list[tuple[str, int]], expected: int
) -> None:
    assert shallowest(kernel(tmp_path, driver, *states)) == expected


def test_a_kernel_that_does_not_choose_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="current_driver"):
        shallowest(tmp_path)
    with pytest.raises(OSError, match=r"driver \(none\) has no states"):
        shallowest(kernel(tmp_path, "none"))


def test_they_are_awake_from_the_first_request_to_a_while_without_one(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    (tmp_path / "cpus").mkdir()
    cores = Cores(device, kernel(tmp_path / "cpus", "intel_idle", ("POLL", 0), ("C1", 2), ("C6", 133)))
    cores.doze()
    assert written(device) == []
    for _ in range(3):
        cores.wake()
    cores.doze()  # requests came since the last time
    assert (cores.awake, written(device)) == (True, [2])
    cores.doze()
    cores.doze()
    assert (cores.awake, written(device)) == (False, [2, UNBOUND])
    cores.wake()
    assert (cores.awake, written(device)) == (True, [2, UNBOUND, 2])
    cores.close()


def test_the_doctor_says_what_keeps_them_from_being_kept_awake(tmp_path: Path) -> None:
    finding = check_cores(tmp_path / "missing")
    assert finding.level is Level.NOTE
    assert finding.fix
