"""The parts of SVG pictures: their frame, rectangles, words, numbers and colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, FAINT = "#24292f", "#6a737d"
MARGIN = 20
MIDDLE, END = ' text-anchor="middle"', ' text-anchor="end"'


def document(
    width: int, height: int, *, title: str, figures: str, style: Sequence[str], body: Sequence[str]
) -> str:
    """A framed picture under a title and a line of figures, which end at y = 60."""
    title, figures = escape(title), escape(figures)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{FONT}">',
            f"<title>{title}; {figures}</title>",
            *style,
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
            'fill="#ffffff" stroke="#d0d7de"/>',
            label(MARGIN, 34, title, size=17, more=' font-weight="600"'),
            label(MARGIN, 56, figures, size=13, ink=FAINT),
            *body,
            "</svg>",
            "",
        ]
    )


def rect(x: float, y: float, width: float, height: float, more: str) -> str:
    numbers = (f'{k}="{short(v)}"' for k, v in zip("xy", (x, y), strict=True))
    size = f'width="{short(width)}" height="{short(height)}"'
    return f"<rect {' '.join(numbers)} {size} {more}/>"


def printable(words: str, most: int = 40) -> str:
    """On one line, and cut where longer than `most`; still to be escaped."""
    shown = "".join(c if c.isprintable() else " " for c in words)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def label(x: float, y: float, words: str, *, size: int = 12, ink: str = INK, more: str = "") -> str:
    """Words that are escaped already, on the line y."""
    place = f'x="{short(x)}" y="{short(y)}"'
    return f'<text {place} font-size="{size}" fill="{ink}"{more}>{words}</text>'


def short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that is at least this: between marks of an axis."""
    return next(s for e in range(19) for s in (10**e, 2 * 10**e, 5 * 10**e) if s >= least)


def mix(start: str, end: str, *, part: float) -> str:
    pairs = zip(_channels(start), _channels(end), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def ink_on(fill: str) -> str:
    """Black or white, whichever has more contrast with the fill (relative luminance of WCAG)."""
    red, green, blue = ((c / 255) ** 2.2 for c in _channels(fill))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if luminance < 0.2 else INK
