import pytest

from kvd.daemon.config import Config
from kvd.engines.vllm.settings import read_settings
from kvd.errors import BadRequest


def test_the_rank_is_put_into_socket_and_name() -> None:
    settings = read_settings({"socket": "/run/kvd-{dp_rank}-{rank}.sock"}, 2).filled(rank=1, dp_rank=3)
    assert (settings.socket, settings.worker) == ("/run/kvd-3-1.sock", "vllm-3-1")


def test_the_socket_is_the_one_given_else_the_environments_else_the_daemons_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    assert read_settings({}, 1).socket == str(Config.model_fields["socket"].default)
    monkeypatch.setenv("KVD_SOCKET", "/env-{rank}.sock")
    assert read_settings({}, 2).filled(rank=1, dp_rank=0).socket == "/env-1.sock"
    assert read_settings({"socket": "/given.sock"}, 1).socket == "/given.sock"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"socket": "/s", "sockets": 1}, "sockets"),
        ({"socket": "/s", "offer_ttl": 0}, "offer_ttl"),
        ({"socket": "/s", "worker": "w"}, "rank"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(extra: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        read_settings(extra, 2)
