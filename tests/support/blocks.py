"""What the blocks of a pool are used for."""

import numpy as np

from kvd.actors.runtime.pools import BlocksInUse


def offered(blocks: BlocksInUse) -> int:
    """How many blocks stand in offers."""
    return sum(int(np.count_nonzero(uses._uses > 0)) for uses in blocks._uses.values())
