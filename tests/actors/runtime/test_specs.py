"""What becomes of those whose specs wait to be read where somebody's part of it fails."""

import contextlib
from functools import partial
from types import SimpleNamespace

from kvd.actors.runtime.specs import SpecReader
from kvd.errors import ErrorCode, refusal


def test_who_fails_on_what_is_wrong_with_its_spec_keeps_nobody_waiting():
    begun, answered, calls = [], [], []

    def background(_work, done):
        if begun:
            raise MemoryError
        begun.append(done)

    def fail(_result):
        raise ZeroDivisionError

    actor = SimpleNamespace(call=lambda method, *args: calls.append(partial(method, *args)))
    reader = SpecReader(background, actor)
    for connection, then in enumerate((answered.append, fail, answered.append, answered.append)):
        reader.read(connection, "party", b"spec", then)
    begun[0](refusal(ErrorCode.BAD_SPEC, "no spec"))
    for each in calls:
        with contextlib.suppress(ZeroDivisionError):
            each()
    assert [error.code for error in answered] == [ErrorCode.BAD_SPEC, ErrorCode.INTERNAL, ErrorCode.INTERNAL]
    assert not any(connection in reader for connection in range(4))
