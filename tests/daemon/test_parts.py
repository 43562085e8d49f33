from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvd.daemon import parts


class Asked(Exception):
    """The provider was asked for; nothing else is opened."""


@pytest.mark.parametrize(("listen", "mappings"), [("ipc:///run/x.peers", 1), ("tcp://10.0.0.1:7400", 2)])
def test_pools_have_page_tables_in_nixls_process_too_if_the_daemon_listens_for_other_hosts(
    listen: str, mappings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider_for = Mock(side_effect=Asked)
    monkeypatch.setattr(parts, "provider_for", provider_for)
    config, any_part = SimpleNamespace(device="cpu", memory="auto", listen=listen), Mock()
    with pytest.raises(Asked):
        parts.open_parts(config, "a", None, loop=any_part, metrics=any_part, health=any_part, log=any_part)  # type: ignore[arg-type]
    assert provider_for.call_args.kwargs == {"mappings": mappings}
