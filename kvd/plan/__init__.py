"""From two layouts and lists of blocks to descriptors: compatibility, routing and planning. Pure; needs numpy."""

from kvd.plan.align import KEYS, VALUES, align
from kvd.plan.arrays import Descriptors, check_ids
from kvd.plan.compat import check_compatible
from kvd.plan.planner import Planner
from kvd.plan.route import route
from kvd.plan.template import check_runs, check_units
from kvd.plan.units import Section, SpanPair

__all__ = [
    "KEYS",
    "VALUES",
    "Descriptors",
    "Planner",
    "Section",
    "SpanPair",
    "align",
    "check_compatible",
    "check_ids",
    "check_runs",
    "check_units",
    "route",
]
