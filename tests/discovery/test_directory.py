"""What the file and DNS say, together, is told whenever it changes."""

import asyncio

import pytest
import structlog

from kvd.discovery import directory
from kvd.discovery.directory import Directory, PeersFile
from kvd.discovery.names import Found
from kvd.errors import BadRequest, ErrorCode, Unavailable

OWN = "tcp://10.0.0.7:7710"


class Names:
    """Gives its answers one after the other, then none."""

    def __init__(self, *answers):
        self._answers = list(answers)

    async def look_up(self):
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(directory, "FILE_SECONDS", 0.001)
    monkeypatch.setattr(directory, "RETRY_SECONDS", 0.0)
    started = []

    def begin(file, names, log=None):
        told = asyncio.Queue()
        started.append(Directory(file, names, told.put_nowait, log or structlog.get_logger()))
        started[-1].start()
        return told

    yield begin
    for each in started:
        each.stop()


async def test_the_file_and_dns_are_told_together_and_again_when_one_changes(start, tmp_path):
    path = tmp_path / "peers"
    path.write_text("b tcp://10.0.0.8:1\n")
    names = Names(Found(frozenset({"tcp://10.0.0.9:1"}), 0.0))
    told = start(PeersFile(path, "a", OWN, None), names)
    assert await told.get() == {"tcp://10.0.0.8:1"}
    assert await told.get() == {"tcp://10.0.0.8:1", "tcp://10.0.0.9:1"}
    path.write_text("c tcp://10.0.0.10:11\n")
    assert await told.get() == {"tcp://10.0.0.10:11", "tcp://10.0.0.9:1"}


async def test_a_failure_changes_nothing_and_is_logged_once_until_it_is_over(start):
    trouble = Unavailable(ErrorCode.DEADLINE, "no server")
    one, other = (Found(frozenset({f"tcp://10.0.0.{n}:1"}), 0.0, frozenset({"x"})) for n in (8, 9))
    with structlog.testing.capture_logs() as logs:
        told = start(None, Names(one, trouble, trouble, one, trouble, other))
        assert await told.get() == one.addresses
        assert await told.get() == other.addresses
    assert [entry["event"] for entry in logs if entry["log_level"] != "info"] == [
        "expected peer is not on the allow-list",
        "the expected peers stay as they were",
        "the expected peers stay as they were",
    ]


class Log:
    """Errors, as they come."""

    def __init__(self):
        self.errors = asyncio.Queue()

    def error(self, event, reason):
        self.errors.put_nowait(reason)

    def info(self, event, peers): ...


async def test_a_file_that_becomes_wrong_changes_nothing(start, tmp_path):
    path, log = tmp_path / "peers", Log()
    path.write_text("b tcp://10.0.0.8:1\n")
    told = start(PeersFile(path, "a", OWN, None), None, log)
    await told.get()
    path.write_text("nonsense\n")
    assert "line 1" in await log.errors.get()
    assert told.empty()


def test_a_peer_in_a_folder_that_is_named_by_a_link_is_met_by_its_own_path(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").symlink_to("folder")
    path = tmp_path / "peers"
    path.write_text(f"b ipc://{tmp_path}/run/b.peers\n")
    assert PeersFile(path, "a", f"ipc://{tmp_path}/a.peers", None).read() == {f"ipc://{tmp_path}/folder/b.peers"}


def test_a_zero_byte_in_the_file_is_told_with_its_line(tmp_path):
    path = tmp_path / "peers"
    path.write_text("b ipc:///run/\0/b.peers\n")
    with pytest.raises(BadRequest, match="line 1:"):
        PeersFile(path, "a", OWN, None).read()
