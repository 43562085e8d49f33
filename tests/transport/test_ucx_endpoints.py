import contextlib
from collections.abc import Iterator

import pytest

from kvd.transport.nixl.ucx_endpoints import UcxEndpoints


def test_the_other_agents_of_the_process_rest_while_ucx_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        seen.append("rests")
        yield
        seen.append("goes on")

    endpoints = UcxEndpoints("nobody", [turn()])
    monkeypatch.setattr(endpoints, "_list", lambda _folder: seen.append("asked") or [])
    assert endpoints.endpoints() == frozenset()
    assert (seen[0], seen[-1]) == ("rests", "goes on")
    assert "asked" in seen
