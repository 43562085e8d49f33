"""Errors: whose fault one is follows from its code."""

import re
from pathlib import Path

import pytest

import kvd
from kvd.errors import BadRequest, ErrorCode, InternalError, Unavailable, error_from_code, refusal
from kvd.limits import MAX_ERROR_TEXT

CHOSEN_BY_HAND = re.compile(r"\b(BadRequest|Unavailable|InternalError)\((?!\)| *BAD_SPEC|code=)")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_each_code_is_of_one_class_here_and_where_it_arrives(code: ErrorCode) -> None:
    error = refusal(code, "why")
    assert (error.code, error.text) == (code, "why")
    assert type(error_from_code(code.value, "why")) is type(error)
    assert [kind for kind in (Unavailable, InternalError) if code in kind.codes] in ([], [type(error)])


def test_an_unknown_code_of_a_newer_version_is_a_bad_request() -> None:
    error = error_from_code("of_tomorrow", "why")
    assert isinstance(error, BadRequest)
    assert (error.code, error.text) == (ErrorCode.BAD_MESSAGE, "why (code 'of_tomorrow', unknown to this version)")


def test_nobody_chooses_the_class_of_an_error_beside_its_code() -> None:
    root = Path(kvd.__file__).parent
    sources = {path: path.read_text() for path in root.rglob("*.py") if path.name != "errors.py"}
    assert [path for path, text in sources.items() if CHOSEN_BY_HAND.search(text)] == []


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_text_is_on_one_line_and_can_be_sent_whatever_it_quotes(code: ErrorCode) -> None:
    error = refusal(code, "at \udcff\n\x1b[31m\0é")
    assert error.text == "at ???[31m?é"
    assert str(error) == f"{code}: {error.text}"


def test_a_text_that_quotes_megabytes_says_what_was_wrong_and_what_to_do() -> None:
    error = refusal(ErrorCode.BAD_SPEC, f"the layout {'x' * MAX_ERROR_TEXT} is wrong: mend it")
    assert len(error.text) == MAX_ERROR_TEXT
    assert error.text.startswith("the layout xx")
    assert error.text.endswith("xx is wrong: mend it")
