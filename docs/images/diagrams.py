"""Draws parts.svg and pull.svg beside this file: `python docs/images/diagrams.py`."""

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
ENGINE, DAEMON, ACTOR, MEMORY = "#dfe8f5", "#f1f1ea", "#ffffff", "#dcefdf"
INK, QUIET, DATA, CONTROL = "#1f2328", "#59636e", "#2f7d3b", "#3b5f9e"


class Drawing:
    """Shapes of one picture, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = INK,
        *,
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """One line of text whose baseline is at y."""
        weight = ' font-weight="bold"' if bold else ""
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}'
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def box(self, area: tuple[float, float, float, float], title: str, color: str, *lines: str) -> None:
        """A box, its area being x, y, width and height, with its title at the top and smaller text below it."""
        x, y, width, height = area
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{color}" stroke="{INK}"/>'
        )
        self.text(x + width / 2, y + 20, title, bold=True)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 39 + 17 * number, line, QUIET, size=12)

    def line(self, x: float, top: float, bottom: float) -> None:
        """A thin vertical line."""
        self._shapes.append(f'<path d="M{x:g} {top:g}V{bottom:g}" stroke="#a0a6ad" stroke-dasharray="4 4"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str, *, width: float = 1.5) -> None:
        """A horizontal or vertical arrow; the head is drawn, as not every viewer knows markers."""
        (x, y), (to_x, to_y) = start, end
        length, half = 5 + 3 * width, 3 + width
        along = ((to_x > x) - (to_x < x), (to_y > y) - (to_y < y))
        neck = (to_x - along[0] * length, to_y - along[1] * length)
        corners = " ".join(
            f"{neck[0] + side * along[1] * half:g},{neck[1] + side * along[0] * half:g}" for side in (-1, 1)
        )
        self._shapes.append(
            f'<path d="M{x:g} {y:g}L{neck[0]:g} {neck[1]:g}" stroke="{color}" stroke-width="{width:g}"/>'
        )
        self._shapes.append(f'<polygon points="{to_x:g},{to_y:g} {corners}" fill="{color}"/>')

    def labelled(
        self, start: tuple[float, float], end: tuple[float, float], text: str, color: str, *, width: float = 1.5
    ) -> None:
        """A horizontal arrow with text above it."""
        self.arrow(start, end, color, width=width)
        self.text((start[0] + end[0]) / 2, start[1] - 7, text, color, size=13)

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._shapes, "</svg>\n"])


ACTORS = (
    ("gateway", "workers in"),
    ("pools", "memory"),
    ("leases", "offers, claims, fence"),
    ("scheduler", "pulls, routes, reads"),
    ("handshake", "peers"),
    ("completion", "notifications out"),
)


def draw_parts() -> str:
    """The processes of one host, the six actors, and what connects them."""
    drawing = Drawing(960, 430, "The parts: a worker, its daemon with six actors and a pool, and a peer daemon")
    drawing.box(
        (20, 20, 210, 150), "inference worker", ENGINE, "vLLM with KvdConnector,", "or anything that uses", "kvd.client"
    )
    drawing.box(
        (20, 290, 210, 120), "pool", MEMORY, "the KV cache, allocated", "by the daemon and", "mapped by the worker"
    )
    drawing.box((350, 20, 370, 390), "kvd daemon, one per GPU", DAEMON)
    for number, (name, task) in enumerate(ACTORS):
        drawing.box((365 + 173 * (number % 2), 56 + 76 * (number // 2), 165, 60), name, ACTOR, task)
    drawing.box(
        (365, 318, 338, 72),
        "transport",
        ACTOR,
        "NIXL agents on threads of their own;",
        "they read the pools of peers into ours",
    )
    drawing.box((840, 20, 100, 390), "peer", DAEMON, "another", "kvd daemon,", "on this host", "or another")
    drawing.labelled((230, 60), (350, 60), "attach", CONTROL)
    drawing.labelled((230, 100), (350, 100), "offer, pull", CONTROL)
    drawing.labelled((350, 140), (230, 140), "done, released", CONTROL)
    drawing.labelled((720, 230), (840, 230), "claim, fence", CONTROL)
    drawing.labelled((840, 270), (720, 270), "grant, held", CONTROL)
    drawing.labelled((840, 354), (720, 354), "KV blocks", DATA, width=4)
    drawing.labelled((365, 354), (230, 354), "into the pool", DATA, width=4)
    drawing.arrow((110, 170), (110, 290), DATA, width=2.5)
    drawing.arrow((140, 290), (140, 170), DATA, width=2.5)
    drawing.text(155, 235, "writes, reads", DATA, size=13, anchor="start")
    return drawing.svg()


STEPS = (
    (0, 1, "offer(blocks, secret)", CONTROL),
    (1, 0, "ticket", CONTROL),
    (0, 3, "the ticket, with the request, through the router", INK),
    (3, 2, "pull(ticket, missing positions)", CONTROL),
    (2, 1, "hello: layouts, metadata (once per peer)", CONTROL),
    (2, 1, "claim(lease, proof of the secret)", CONTROL),
    (1, 2, "grant(generation)", CONTROL),
    (1, 2, "KV blocks, read one-sidedly", DATA),
    (2, 1, "fence(generation), after the last byte", CONTROL),
    (1, 2, "held", CONTROL),
    (2, 3, "done", CONTROL),
    (1, 0, "released", CONTROL),
)


def draw_pull() -> str:
    """One pull as a sequence of messages, from offer to done."""
    drawing = Drawing(960, 510, "One pull: offer, ticket, pull, claim, grant, read, fence, held, done, released")
    at = (90, 320, 640, 870)
    names = ("prefill worker", "its daemon (P)", "its daemon (D)", "decode worker")
    for x, name, color in zip(at, names, (ENGINE, DAEMON, DAEMON, ENGINE), strict=True):
        drawing.line(x, 45, 495)
        drawing.box((x - 75, 15, 150, 30), name, color)
    for number, (source, target, text, color) in enumerate(STEPS):
        y = 82 + 36 * number
        drawing.labelled((at[source], y), (at[target], y), text, color, width=4 if color == DATA else 1.5)
    return drawing.svg()


def pictures() -> dict[str, str]:
    """Each picture by the name of its file."""
    return {"parts.svg": draw_parts(), "pull.svg": draw_pull()}


if __name__ == "__main__":
    for name, drawing in pictures().items():
        (FOLDER / name).write_text(drawing, encoding="utf-8")
