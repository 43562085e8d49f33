import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.limits import GIB, KIB, MIB
from kvd.units import printable, shortened, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (256 * KIB, "256 KiB"),
        (999.4 * KIB, "999 KiB"),
        (999.7 * KIB, "0.976 MiB"),
        (64 * MIB, "64 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (1024 * GIB, "1 TiB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(count: float, text: str) -> None:
    assert size(count) == text


def test_a_text_of_others_is_one_line_that_moves_no_cursor() -> None:
    assert printable("größe 1 GiB") == "größe 1 GiB"
    assert printable("no\x1b[2J\r\nok\x9b\u2028\udcff") == "no?[2J??ok???"
    printable("\udcff").encode()


@given(st.text(), st.integers(5, 40))
def test_a_long_text_keeps_its_ends(text: str, most: int) -> None:
    short = shortened(text, most)
    assert len(short) == min(len(text), most)
    if short != text:
        end = (most - len("[...]")) // 2
        assert text.startswith(short[: most - len("[...]") - end])
        assert text.endswith(short[most - end :])
