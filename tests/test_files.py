"""Files of settings, and what may lie in their place."""

import os
import socket
from pathlib import Path

import pytest

from kvd import files
from kvd.errors import BadRequest, ErrorCode


@pytest.fixture
def writer(tmp_path: Path):
    """A FIFO that has a writer, who writes nothing."""
    os.mkfifo(tmp_path / "fifo")
    descriptor = os.open(tmp_path / "fifo", os.O_RDWR)
    yield tmp_path / "fifo"
    os.close(descriptor)


def refused(path: Path) -> str:
    with pytest.raises(BadRequest) as caught:
        files.read(path, 100)
    assert caught.value.code is ErrorCode.BAD_CONFIG
    return caught.value.text


def test_what_is_no_file_is_refused_at_once(tmp_path: Path, writer: Path) -> None:
    os.mkfifo(tmp_path / "alone")
    for path in (tmp_path / "alone", writer, Path("/dev/zero")):
        assert refused(path) == f"{path} is no regular file"
    assert refused(tmp_path) == f"cannot read {tmp_path}: Is a directory"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock"))
        assert refused(tmp_path / "sock") == f"cannot read {tmp_path / 'sock'}: No such device or address"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / ("a" * 300)).endswith(": File name too long")
    assert refused(tmp_path / "a\0b") == f"cannot read '{tmp_path}/a\\x00b': embedded null byte"


@pytest.mark.parametrize("text", ["a = ", "a = " + "[" * 20_000, "a = " + "1" * 5_000])
def test_toml_that_cannot_be_parsed_is_refused_with_its_file(text: str) -> None:
    with pytest.raises(BadRequest, match=r"^bad_config: /etc/kvd\.toml: \S") as caught:
        files.parse_toml(Path("/etc/kvd.toml"), text)
    assert caught.value.code is ErrorCode.BAD_CONFIG
