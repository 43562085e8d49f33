"""The check that all sources of peers share."""

from collections.abc import Iterable

from kvd.errors import ErrorCode, refusal
from kvd.protocol.address import is_local


def check_mutual(own: str, addresses: Iterable[str]) -> None:
    """Checks that the daemons at `addresses` could reach the one at `own`, too.

    Raises:
        BadRequest: `BAD_CONFIG`, one of them is on another host, where `own` means that host itself.

    """
    abroad = sorted(address for address in addresses if not is_local(address))
    if abroad and is_local(own):
        text = (
            f"peers would look for this daemon at {own.partition('#')[0]}, which on {abroad[0]}'s host means "
            "that host itself; set `listen` (or `advertise`) to an address that other hosts reach"
        )
        raise refusal(ErrorCode.BAD_CONFIG, text)
