"""The peer file."""

import os
from pathlib import Path

import pytest

from kvd.discovery.directory import PeersFile
from kvd.errors import BadRequest
from kvd.net import keys
from kvd.net.keys import Allowed
from kvd.net.trust import Trust

OWN, OTHER = keys.generate(), keys.generate()
TRUST = Trust(OWN, "host-a", {OTHER.public: Allowed("host-b")})
ABROAD = "tcp://10.0.0.7:7710"


def file_of(tmp_path, text, *, own=ABROAD, trust=None):
    path = tmp_path / "peers"
    path.write_text(text)
    return PeersFile(path, "host-a", own, trust)


def test_every_line_is_a_daemon_to_meet_but_the_own_one(tmp_path):
    text = "# fleet\n\nhost-a tcp://10.0.0.7:7710\nhost-b tcp://10.0.0.8:7710 # spare\n"
    assert file_of(tmp_path, text).read() == {"tcp://10.0.0.8:7710"}


def test_a_key_that_is_left_out_is_the_one_allowed_for_the_name(tmp_path):
    other = f"tcp://10.0.0.9:1#{'ab' * 32}"
    file = file_of(tmp_path, f"host-b tcp://10.0.0.8:7710\nhost-c {other}\n", trust=TRUST)
    assert file.read() == {f"tcp://10.0.0.8:7710#{OTHER.public.hex()}", other}


@pytest.mark.parametrize(
    ("text", "own", "reason"),
    [
        ("host-b\n", ABROAD, r"line 1: 'host-b' is not `<name> tcp://host:port`, nor `ipc:///path`"),
        ("\nhost-b udp://x:1\n", ABROAD, "line 2"),
        ("host-b tcp://0.0.0.0:1\n", ABROAD, "line 1"),
        ("host-z tcp://10.0.0.9:1\n", ABROAD, "line 1: 'host-z' is not on the allow-list"),
        (
            "host-b tcp://10.0.0.8:1\n",
            "tcp://127.0.0.1:7710",
            "peers would look for this daemon at tcp://127.0.0.1:7710, which on tcp://10.0.0.8.* set `listen`",
        ),
    ],
)
def test_a_wrong_line_or_an_own_address_that_no_peer_reaches_is_refused(tmp_path, text, own, reason):
    with pytest.raises(BadRequest, match=reason):
        file_of(tmp_path, text, own=own, trust=TRUST).read()


def test_peers_on_loopback_may_be_met_from_loopback(tmp_path):
    file = file_of(tmp_path, "host-b tcp://127.0.0.1:2\n", own="tcp://127.0.0.1:1")
    assert file.read() == {"tcp://127.0.0.1:2"}


def test_a_change_is_seen_once_and_a_missing_file_is_none(tmp_path):
    file = file_of(tmp_path, "")
    assert not file.changed()
    replacement = tmp_path / "new"
    replacement.write_text("host-b tcp://10.0.0.8:1\n")
    os.replace(replacement, tmp_path / "peers")
    assert [file.changed(), file.changed()] == [True, False]
    (tmp_path / "peers").unlink()
    assert not file.changed()


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    file = file_of(tmp_path, "")
    os.mkfifo(tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "peers")
    assert file.changed()
    with pytest.raises(BadRequest, match="peers is no regular file"):
        file.read()


def test_a_path_that_is_none_is_refused():
    file = PeersFile(Path("a\0b"), "host-a", ABROAD, None)
    assert not file.changed()
    with pytest.raises(BadRequest, match=r"cannot read 'a\\x00b': embedded null byte"):
        file.read()
