"""Load on a pair of vLLM's: no cache has blocks of a request, they all travel."""

import itertools
from functools import partial
from typing import Any

from tests.serving import load

_salts = itertools.count()


def _salt() -> dict[str, Any]:
    return {"cache_salt": f"salt-{next(_salts)}"}


one = partial(load.one, more=_salt)
Load = partial(load.Load, more=_salt)
