from collections.abc import Callable

from kvd.transport.nixl.probe import ExaminedPeers


class Run:
    """Peers whose metadata the test examines: `say` has an answer for each time that was asked for one."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, bytes]] = []
        self.say: list[Callable[[str], None]] = []
        self.loaded: list[tuple[str, bytes]] = []
        self.refused: list[tuple[str, str]] = []
        self.peers = ExaminedPeers(
            self._examine, load=lambda *what: self.loaded.append(what), refuse=lambda *what: self.refused.append(what)
        )

    def _examine(self, _agent: str, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        self.asked.append((known, metadata))
        self.say.append(done)


def test_metadata_is_loaded_when_no_fault_was_found_with_it() -> None:
    run = Run()
    run.peers.add("peer", b"theirs")
    assert run.loaded == []
    run.say[0]("")
    assert run.loaded == [("peer", b"theirs")]
    run.peers.add("peer", b"theirs")
    assert len(run.asked) == 1, "the same is not examined twice"
    run.peers.add("peer", b"newer")
    assert run.asked == [(b"", b"theirs"), (b"theirs", b"newer")]


def test_metadata_with_a_fault_is_refused_and_its_peer_forgotten() -> None:
    run = Run()
    run.peers.add("peer", b"theirs")
    run.say[0]("")
    run.peers.add("peer", b"newer")
    run.say[1]("it ended the process")
    assert run.refused == [("peer", "it ended the process")]
    run.peers.add("peer", b"theirs")
    assert run.asked[-1] == (b"", b"theirs")


def test_what_is_said_of_metadata_that_is_not_the_latest_or_of_a_peer_removed_meanwhile_is_not_heard() -> None:
    run = Run()
    run.peers.add("peer", b"theirs")
    run.peers.add("peer", b"newer")
    run.say[0]("bad")
    run.peers.forget("peer")
    run.say[1]("")
    assert (run.loaded, run.refused) == ([], [])


def test_metadata_that_a_second_link_brings_while_it_is_examined_is_not_loaded_before_that_is_over() -> None:
    run = Run()
    run.peers.add("peer", b"theirs")
    run.peers.add("peer", b"theirs")
    run.say[-1]("it ended the process")
    run.say[0]("it ended the process")
    assert (run.loaded, run.refused) == ([], [("peer", "it ended the process")])


def test_after_the_stop_nothing_is_loaded() -> None:
    run = Run()
    run.peers.add("peer", b"theirs")
    run.peers.forget_all()
    run.say[0]("")
    assert run.loaded == []
