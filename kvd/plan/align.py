"""Describes two layouts in the same terms where engines describe the same bytes in different ones.

Some keep keys and values together, others apart; some keep a head's bytes in rows, others dimension by dimension. Each
declares what it has. Here the coarser of two descriptions is refined until both name the same components and
dimensions. Nothing is made up: a refined view addresses the same bytes. What still differs `check_compatible` refuses.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

from kvd.layout import Axis, CacheSpec, Group, View

KEYS, VALUES = " keys", " values"
"""How the names of components end that are the halves of another one, which has a `kv` axis."""

_replace = msgspec.structs.replace


def align(source: CacheSpec, destination: CacheSpec) -> tuple[CacheSpec, CacheSpec]:
    """Both specs, refined. Groups that lie `beside` the cache of one side alone have no views any more, on either.

    Raises:
        BadRequest: BAD_SPEC, refined a spec would have more coordinates than any may have.

    """
    pairs = [_aligned(ours, theirs) for ours, theirs in zip_longest(source.groups, destination.groups)]
    if all(pair == groups for pair, groups in zip(pairs, zip_longest(source.groups, destination.groups), strict=True)):
        return source, destination
    ours, theirs = ([group for group in side if group is not None] for side in zip(*pairs, strict=True))
    return _replace(source, groups=tuple(ours)), _replace(destination, groups=tuple(theirs))


def _aligned(ours: Group | None, theirs: Group | None) -> tuple[Group | None, Group | None]:
    if ours is None or theirs is None:
        alone = ours or theirs
        if alone is None or not alone.beside:
            return ours, theirs
        nothing = _replace(alone, views=())
        return nothing, nothing
    return (
        _replace(ours, views=_refined(ours.views, theirs.views)),
        _replace(theirs, views=_refined(theirs.views, ours.views)),
    )


def _refined(views: Sequence[View], others: Sequence[View]) -> tuple[View, ...]:
    known = {view.component: view for view in others}
    return tuple(_by_channel(half, known) for view in views for half in _halves(view, known))


def _halves(view: View, known: dict[str, View]) -> Iterator[View]:
    """Keys and values as two views where the other side has them so."""
    apart = [axis for axis in view.axes if axis.dim == "kv" and axis.size == 2]
    if not apart or view.component + KEYS not in known:
        yield view
        return
    axes = tuple(axis for axis in view.axes if axis.dim != "kv")
    for number, half in enumerate((KEYS, VALUES)):
        offset = view.offset + number * apart[0].stride
        yield _replace(view, component=view.component + half, offset=offset, axes=axes)


def _by_channel(view: View, known: dict[str, View]) -> View:
    """A row as its elements where the other side has elements."""
    other = known.get(view.component)
    row = view.axes[-1]
    if other is None or view.size("channel") > 1 or other.size("channel") == 1:
        return view
    channels, width = other.size("channel"), other.size("byte")
    if row.size != channels * width:
        return view
    return _replace(view, axes=(*view.axes[:-1], Axis("channel", channels, width), Axis("byte", width, 1)))
