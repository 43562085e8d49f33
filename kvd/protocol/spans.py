"""Lists of blocks that continue each other."""

from collections.abc import Iterable

from kvd.errors import ErrorCode, refusal
from kvd.protocol.types import Span, Spans


def go_on(stops: dict[int, int], span: Span) -> None:
    """Notes a span in `stops`, the position behind the last block of each group.

    Raises:
        BadRequest: `BAD_BLOCKS`, it does not begin there.

    """
    group = span.group
    if stops.get(group, span.first) != span.first:
        text = f"blocks of group {group} are named from position {span.first} on; those before end at"
        raise refusal(ErrorCode.BAD_BLOCKS, f"{text} {stops[group]}, and the next ones begin there")
    stops[group] = span.first + len(span.ids) // 4


def joined(parts: Iterable[Spans]) -> Spans:
    """One span a group, in the order in which the groups first appear, from lists of spans that continue each other.

    Both sides of an offer that grows join what they have this way, so that their proofs are over the same list.

    Raises:
        BadRequest: `BAD_BLOCKS`, blocks of a group do not begin at the position behind those before them.

    """
    ids: dict[int, list[bytes]] = {}
    first: dict[int, int] = {}
    stops: dict[int, int] = {}
    for spans in parts:
        for span in spans:
            go_on(stops, span)
            first.setdefault(span.group, span.first)
            ids.setdefault(span.group, []).append(span.ids)
    return tuple(Span(group, first[group], b"".join(found)) for group, found in ids.items())
