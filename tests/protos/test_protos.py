import base64
import json
from pathlib import Path

import msgspec
import pytest

from kvd.cli.main import main
from kvd.cli.protos import documents
from kvd.errors import BadRequest, ErrorCode
from kvd.protocol import codec, peer, worker

PROTOS = Path(__file__).parents[2] / "protos"
GOLDEN = json.loads((PROTOS / "golden.json").read_text())
DECODERS = (
    codec.worker_requests,
    codec.worker_replies,
    codec.session_requests,
    codec.session_replies,
    codec.peer_requests,
    codec.peer_replies,
)


def test_the_description_is_what_the_code_says(capsys):
    assert main(["protos", "--check", str(PROTOS)]) == 0, capsys.readouterr().out


def test_a_file_that_differs_is_named(tmp_path, capsys):
    assert main(["protos", "--write", str(tmp_path)]) == 0
    (tmp_path / "errors.md").write_text("old")
    assert main(["protos", "--check", str(tmp_path)]) == 1
    assert "errors.md" in capsys.readouterr().out


def tags(*unions):
    return {kind.__struct_config__.tag for union in unions for kind in union.__args__}


def test_every_message_has_a_golden_frame():
    everything = tags(
        worker.Request,
        worker.Reply,
        worker.SessionRequest,
        worker.SessionReply,
        peer.PeerRequest,
        peer.PeerReply,
    )
    assert {frame["json"][0] for frame in GOLDEN if isinstance(frame["json"][0], str)} >= everything


@pytest.mark.parametrize("frame", GOLDEN, ids=lambda frame: frame["message"])
def test_golden_frames_are_read_and_written_again_as_they_are(frame):
    raw = bytes.fromhex(frame["hex"])
    for decoder in DECODERS:
        try:
            message = decoder.decode(raw)
        except BadRequest:
            continue
        if type(message).__name__ == frame["message"]:
            assert codec.encode(message) == raw
            assert json.loads(msgspec.json.encode(message)) == frame["json"]
            return
    assert frame["message"] == "Ticket"


def test_bytes_are_base64_in_the_json_form():
    attach = next(frame for frame in GOLDEN if frame["message"] == "Attach")
    assert base64.b64decode(attach["json"][2]) == bytes(range(16))


def test_every_error_code_is_explained():
    assert all(f"`{code}`" in documents()["errors.md"] for code in ErrorCode)


def test_the_order_of_messages_names_every_message():
    told = (PROTOS / "README.md").read_text() + "".join(documents().values())
    for tag in tags(worker.Request, worker.Reply, peer.PeerRequest, peer.PeerReply):
        assert f"{tag}" in told
