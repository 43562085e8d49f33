import pytest

from kvd.engines.vllm.settings import read_settings
from kvd.errors import BadRequest


def test_the_rank_is_put_into_socket_and_name() -> None:
    settings = read_settings({"socket": "/run/kvd-{dp_rank}-{rank}.sock"}, 2).for_rank(1, 3)
    assert (settings.socket, settings.worker) == ("/run/kvd-3-1.sock", "vllm-3-1")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "socket"),
        ({"socket": "/s", "sockets": 1}, "sockets"),
        ({"socket": "/s", "offer_ttl": 0}, "offer_ttl"),
        ({"socket": "/s", "worker": "w"}, "rank"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(extra: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        read_settings(extra, 2)
