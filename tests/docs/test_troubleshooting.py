"""The page about failures has every error code, and says of each what its class says."""

import re

import pytest

from kvd.errors import BadRequest, ErrorCode, InternalError, Unavailable, error_from_code
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("code", ErrorCode)
def test_each_code_has_meaning_cause_advice_and_whether_to_try_again(code: ErrorCode) -> None:
    cells = [cell.strip() for cell in ROWS[code].split(" | ")]
    assert len(cells) == 4
    assert all(cells)


def test_the_table_has_the_codes_in_their_order_and_no_others() -> None:
    assert list(ROWS) == list(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_again_is_no_for_exactly_the_codes_that_will_be_refused_again(code: ErrorCode) -> None:
    again = ROWS[code].split(" | ")[-1].strip()
    kind = type(error_from_code(code, ""))
    assert (again == "no") == (kind in (BadRequest, InternalError)), f"{code} is {kind.__name__}"
    assert kind is not Unavailable or again.startswith(("yes", "with a new ticket"))
