import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import BadRequest, ErrorCode
from kvd.net import keys

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def file(tmp_path: Path):
    yield tmp_path / "file"
    for each in tmp_path.iterdir():
        each.unlink()


def test_a_key_file_comes_back_as_it_was_and_only_its_owner_may_read_it(file: Path) -> None:
    pair = keys.generate()
    before = os.umask(0)
    try:
        keys.save(pair, file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert keys.load(file) == pair


def test_a_key_is_never_overwritten(file: Path) -> None:
    keys.save(keys.generate(), file)
    with pytest.raises(BadRequest, match="would shut out every peer"):
        keys.save(keys.generate(), file)


def test_a_key_that_cannot_be_written_whole_is_not_there_at_all(file: Path, monkeypatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(BadRequest, match=f"cannot write {file}: No space left on device") as caught:
            keys.save(keys.generate(), file)
    assert caught.value.code is ErrorCode.BAD_CONFIG
    assert os.listdir(file.parent) == []
    keys.save(keys.generate(), file)
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("name", ["no/such/folder", "a" * 300, "."])
def test_a_path_at_which_no_key_can_be_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=f"^bad_config: .*{tmp_path}"):
        keys.save(keys.generate(), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_key_that_others_may_read_is_refused_with_the_fix(file: Path) -> None:
    keys.save(keys.generate(), file)
    file.chmod(0o640)
    with pytest.raises(BadRequest, match=f"run `chmod 600 {file}`") as caught:
        keys.load(file)
    assert caught.value.code is ErrorCode.BAD_CONFIG


@pytest.mark.skipif(os.getuid() != 0, reason="what belongs to root takes root to make")
@pytest.mark.parametrize(("mode", "allowed"), [(0o440, True), (0o640, True), (0o460, False), (0o444, False)])
def test_a_secret_that_root_lends_to_the_daemons_group_is_read(file: Path, monkeypatch, mode, allowed) -> None:
    pair = keys.generate()
    keys.save(pair, file)
    file.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 64000)
    if allowed:
        assert keys.load(file) == pair
    else:
        with pytest.raises(BadRequest, match="others may read the secret key"):
            keys.load(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no key file"),
        (f"public = {KEY}\n", "is no key file"),
        (f"public = {KEY}\nsecret = {KEY}\n", "is not that of the secret one"),
        ("x" * 5000, "more than 4096 bytes"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_what_is_no_key_file_is_refused(file: Path, text: str, reason: str) -> None:
    file.write_text(text, errors="surrogateescape")
    file.chmod(0o600)
    with pytest.raises(BadRequest, match=reason):
        keys.load(file)


def test_an_allow_list_gives_names_by_key_and_the_pools_that_each_may_read(file: Path) -> None:
    file.write_text(f"# fleet\n\n{KEY} host-a\n  {OTHER}\thost-b prefill.* vision # spare\n")
    file.chmod(0o644)
    assert keys.load_allowed(file) == {
        bytes.fromhex(KEY): keys.Allowed("host-a", ("*",)),
        bytes.fromhex(OTHER): keys.Allowed("host-b", ("prefill.*", "vision")),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{KEY}\n", "line 1: .* is not `<64 hexadecimal digits> <name>"),
        (f"\n{KEY[2:]} a\n", "line 2"),
        (f"{KEY} a#b\n{KEY} c", "line 2: .*is there already"),
        (f"{KEY} a\n{OTHER} a\n", "line 2: .*'a' is there already"),
        (f"{KEY} ../a\n", "line 1"),
    ],
)
def test_an_allow_list_with_a_wrong_line_is_refused_whole(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    file.chmod(0o644)
    with pytest.raises(BadRequest, match=reason):
        keys.load_allowed(file)


def test_an_allow_list_that_others_may_write_to_is_refused(file: Path) -> None:
    file.write_text("")
    file.chmod(0o666)
    with pytest.raises(BadRequest, match="others could add their keys"):
        keys.load_allowed(file)


@pytest.mark.skipif(os.getuid() != 0, reason="what belongs to another user takes root to make")
@pytest.mark.parametrize("load", [keys.load, keys.load_allowed])
def test_a_file_of_another_user_is_refused_whatever_its_mode(file: Path, load: Callable[[Path], object]) -> None:
    keys.save(keys.generate(), file)
    os.chown(file, 12345, -1)
    with pytest.raises(BadRequest, match=f"{file} belongs to user 12345, who could .*; run `chown 0 {file}`"):
        load(file)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(BadRequest, match=f"cannot read {file}: No such file"):
        keys.load_allowed(file)
