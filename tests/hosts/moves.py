"""Moves a sequence between two engines: `python -m tests.hosts.moves LAYOUT LAYOUT SOCKET SOCKET SOCKET SOCKET`.

The first two sockets are those of the producing ranks' daemons. A process of its own has the GPUs that they have.
"""

import sys
from types import SimpleNamespace

from kvd.layout import Full
from kvd.layout.models import LayerKind
from kvd.layout.presets import Attention
from tests.e2e.engines import engines, model, move, seeded, specs

ATTENTION = model(LayerKind(Full(), (0, 1, 2), (Attention(heads=4, head_bytes=2),)))


def main(layout, other, *sockets):
    daemons = [SimpleNamespace(socket=socket) for socket in sockets]
    ours, theirs = specs(ATTENTION, layout, tp=2), specs(ATTENTION, other, tp=2)
    with engines(daemons[:2], ours, daemons[2:], theirs) as both:
        move(*both, 18, seeded(layout + other))


if __name__ == "__main__":
    main(*sys.argv[1:])
