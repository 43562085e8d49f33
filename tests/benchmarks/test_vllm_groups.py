import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.vllm.groups import control_group, place
from kvd.cgroups import processor_group
from kvd.errors import BadRequest
from tests.vllm.testbed.pair import KvdPair


@pytest.fixture
def stack() -> ExitStack:
    """Undone by the tests: what it removes is what they are about."""
    return ExitStack()


def make_pair(folder: Path) -> KvdPair:
    return KvdPair(folder / "kvd", folder, "model")


@pytest.mark.real
@pytest.mark.parametrize(("kind", "groups"), [("session", 0), ("cgroup", 4), ("shared", 2)])
def test_daemons_and_engines_run_in_groups_of_the_kind_asked_for_which_are_gone_after(
    tmp_path: Path, stack: ExitStack, kind: str, groups: int
) -> None:
    pair = make_pair(tmp_path)
    with stack:
        try:
            place(kind, pair, stack)
        except BadRequest as error:
            pytest.skip(error.text)
        services = (*pair.daemons.values(), pair.prefill, pair.decode)
        seen = []
        for number, service in enumerate(services):
            told = tmp_path / str(number)
            said = subprocess.run([*service.within, "cat", "/proc/self/cgroup"], stdout=subprocess.PIPE, check=True)
            told.write_bytes(said.stdout)
            seen.append(processor_group(told))
        found = {group.folder for group in seen if group is not None}
        assert len(found) == groups
        assert all(group.weight == 100 for group in seen if group is not None)
        assert (seen[:2] == seen[2:]) is (kind != "cgroup"), "daemons come first, then their engines"
    assert not any(folder.exists() for folder in found)


def test_control_groups_that_cannot_be_made_or_weigh_nothing_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="have no weight: echo \\+cpu > "), control_group("one", tmp_path):
        pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(BadRequest, match="No such file or directory; run as root"), control_group("a/b", tmp_path):
        pass
