"""How KV memory is laid out: views with named dimensions, shards, groups, windows. Pure; needs no numpy."""

from kvd.layout.shard import Shard
from kvd.layout.spec import VERSION_OF, CacheSpec, Group
from kvd.layout.view import Axis, Dim, View, strided
from kvd.layout.window import Chunked, Full, Sliding, State, Window

__all__ = [
    "VERSION_OF",
    "Axis",
    "CacheSpec",
    "Chunked",
    "Dim",
    "Full",
    "Group",
    "Shard",
    "Sliding",
    "State",
    "View",
    "Window",
    "strided",
]
