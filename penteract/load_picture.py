"""How a model's experts were loaded over time, drawn as text and as SVG.

A load is an expert's tokens over the mean of its layer: 1 is balanced, 0 is dead. Steps that share
a column have their tokens added up; the other figures are means over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np
import numpy.typing as npt

from penteract.svg import (
    END,
    FAINT,
    INK,
    MARGIN,
    MIDDLE,
    document,
    label,
    mix,
    printable,
    rect,
    round_step,
    short,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2.0, 3.0, 4.0)  # between the colours of loads above 0
_DEAD, _COLD, _EVEN, _HOT = "#000000", "#1f62a8", "#f0f2f4", "#a83a06"
COLOURS = (
    _DEAD,
    *(mix(_COLD, _EVEN, part=i / 4) for i in range(4)),
    *(mix(_EVEN, _HOT, part=i / 5) for i in range(6)),
)
_MEAN = 5  # the colour of loads near 1
_BARS = "x▁▂▃▄▅▆▇█"
_COLUMNS, _FEWEST, _CELLS, _TEXT_COLUMNS = 200, 50, 500_000, 64
_TEXT_ROWS = 16
_WIDTH, _LEFT, _GAP, _TOP = 1200, 44, 26, 122
_HEAD, _CAPTION, _STRIP, _FOOT = 20, 18, 34, 42  # heights of a panel but for its experts


@dataclass(frozen=True)
class Layer:
    """One layer with experts, in the steps that were logged."""

    name: str
    steps: Ints  # [n], rising
    tokens: Floats  # [n, experts]
    dropped: Floats  # [n], shares of the choices
    entropy: Floats  # [n], nats

    @property
    def experts(self) -> int:
        return self.tokens.shape[1]

    def balance(self) -> Floats:
        """[n]: the largest load."""
        return loads(self.tokens).max(1)


def loads(tokens: Floats) -> Floats:
    """[n, experts]: tokens over their mean; 0 where there are none."""
    mean = tokens.mean(1, keepdims=True)
    return np.divide(tokens, mean, out=np.zeros_like(tokens), where=mean > 0)


def level(load: Floats) -> Ints:
    """Which of `COLOURS` a load has."""
    return np.where(load > 0, np.searchsorted(BOUNDS, load, side="right") + 1, 0)


@dataclass(frozen=True)
class Columns:
    """Time from step `first`, cut into columns of `width` steps. A column that no logged step falls
    into looks like the one before it.
    """

    first: int
    width: int
    count: int
    apart: int  # steps from one that was logged to the next

    @classmethod
    def of(cls, layers: Sequence[Layer], most: int) -> Columns:
        """At most this many."""
        steps = np.unique(np.concatenate([layer.steps for layer in layers]))
        apart = int(np.gcd.reduce(np.diff(steps))) if len(steps) > 1 else 1
        lines = int(steps[-1] - steps[0]) // apart + 1
        shared = -(-lines // most)
        return cls(int(steps[0]), shared * apart, -(-lines // shared), apart)

    def starts(self, layer: Layer) -> tuple[Ints, Ints]:
        """The columns that a step falls into, and where in the layer's steps each begins."""
        columns, starts = np.unique((layer.steps - self.first) // self.width, return_index=True)
        return columns, starts

    def edges(self, layer: Layer, width: int) -> Ints:
        """Where these columns begin and the last one ends, of `width` pixels or characters."""
        ends = np.append(self.starts(layer)[0], self.count)
        return np.round(ends * width / self.count).astype(np.int64)

    def summed(self, layer: Layer) -> Floats:
        """[columns that a step falls into, experts]: loads."""
        return loads(np.add.reduceat(layer.tokens, self.starts(layer)[1]))

    def said(self) -> str:
        return "a column is " + ("a step" if self.width == 1 else f"{self.width} steps")


# --- text ---


def text(layers: Sequence[Layer]) -> str:
    """Figures and a line an expert; of many experts those with the most tokens and the fewest."""
    columns = Columns.of(layers, _TEXT_COLUMNS)
    legend = f"▄ the mean load, █ twice the mean or more, x no token; {columns.said()}"
    return "\n".join([*(line for layer in layers for line in _told(layer, columns)), legend])


def _told(layer: Layer, columns: Columns) -> Iterator[str]:
    balance, final = layer.balance(), loads(layer.tokens[-1:])[0]
    worst = int(balance.argmax())
    yield f"{printable(layer.name)}: {_counted(layer.experts, 'expert')}, {_period(layer.steps)}"
    yield (
        f"  balance  last {balance[-1]:.2f}, mean {balance.mean():.2f}, "
        f"largest {balance[worst]:.2f} at step {layer.steps[worst]}"
    )
    yield f"  dropped  last {_percent(layer.dropped[-1])}, mean {_percent(layer.dropped.mean())}"
    most = math.log(layer.experts)
    mean = layer.entropy.mean()
    yield f"  entropy  last {layer.entropy[-1]:.2f}, mean {mean:.2f}, at most {most:.2f} nats"
    for what, sign in (("most", -1), ("least", 1)):
        order = np.argsort(sign * final, kind="stable")[:4]
        named = ", ".join(f"expert {i} ({final[i]:.2f})" for i in order)
        yield f"  {what:<7}  last {named}"
    yield from _lines(layer, columns)
    yield ""


def _lines(layer: Layer, columns: Columns) -> Iterator[str]:
    load = columns.summed(layer)  # [columns, experts]
    wide = np.diff(columns.edges(layer, columns.count))
    bars = np.where(load > 0, np.clip(np.round(load * 4), 1, 8), 0).astype(int)
    shown, half = np.arange(layer.experts), _TEXT_ROWS // 2
    if layer.experts > _TEXT_ROWS:
        shown = np.argsort(-layer.tokens.sum(0), kind="stable")
    digits = max(len(str(layer.experts - 1)), 7)
    for place, expert in enumerate(shown):
        if len(shown) <= _TEXT_ROWS or min(place, len(shown) - 1 - place) < half:
            line = "".join(_BARS[b] * n for b, n in zip(bars[:, expert], wide, strict=True))
            yield f"  {expert:>{digits}}  {line}"
        elif place == half:
            yield f"  {'…':>{digits}}  {len(shown) - 2 * half} experts with tokens between these"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _period(steps: Ints) -> str:
    first, last = int(steps[0]), int(steps[-1])
    return f"step {last}" if first == last else f"steps {first} to {last}"


def _percent(share: float) -> str:
    return f"{short(100 * share)} %"


# --- SVG ---


@dataclass(frozen=True)
class _Look:
    """What the panels of a picture share; sizes in pixels."""

    columns: Columns
    across: int  # panels side by side
    width: int  # of a panel, from the first column to the last
    row: int
    experts: int
    balance: float  # where scales end
    dropped: float

    def height(self) -> int:
        strips = 2 if self.dropped else 1
        return _HEAD + self.row * self.experts + strips * (_CAPTION + _STRIP) + _FOOT


def _look(layers: Sequence[Layer]) -> _Look:
    rows = sum(layer.experts for layer in layers)
    columns = Columns.of(layers, max(_FEWEST, min(_COLUMNS, _CELLS // rows)))
    experts = max(layer.experts for layer in layers)
    across = next((n for n in (1, 2, 3) if len(layers) <= n * n), 4)
    room = (_WIDTH - 2 * MARGIN - (across - 1) * _GAP) // across - _LEFT
    largest = max(float(layer.balance().max()) for layer in layers)
    return _Look(
        columns,
        across,
        width=min(room, max(40 * columns.count, (720 - 2 * MARGIN) // across - _LEFT)),
        row=min(20, max(1, max(256, 640 // across) // experts)),
        experts=experts,
        balance=2.0 ** max(1, math.ceil(math.log2(max(largest, 1)))),
        dropped=max(float(layer.dropped.max()) for layer in layers),
    )


def svg(layers: Sequence[Layer], name: str) -> str:
    """A panel a layer; below each the largest load and, where a layer drops choices, their share.

    A panel has at most 200 columns, and where all panels together would have more than half a
    million cells, fewer, but not less than 50. `name` is the run's.
    """
    look = _look(layers)
    wide = look.across * (_LEFT + look.width + _GAP) - _GAP
    deep = -(-len(layers) // look.across) * look.height()
    sizes = sorted({layer.experts for layer in layers})
    steps = np.unique(np.concatenate([layer.steps for layer in layers]))
    figures = (
        f"{_counted(len(layers), 'layer')} of {' or '.join(_counted(n, 'expert') for n in sizes)}, "
        f"{_period(steps)}; {look.columns.said()}"
    )
    style = ["<style>", *(f".l{i}{{stroke:{c}}}" for i, c in enumerate(COLOURS)), "</style>"]
    body = [*_legend()]
    for i, layer in enumerate(layers):
        down, right = divmod(i, look.across)
        place = MARGIN + _LEFT + right * (_LEFT + look.width + _GAP), _TOP + down * look.height()
        body += [f'<g transform="translate({place[0]} {place[1]})">', *_panel(layer, look), "</g>"]
    title = f"Load of experts: {printable(name, 60)}"
    size = max(720, 2 * MARGIN + wide), _TOP + deep
    return document(*size, title=title, figures=figures, style=style, body=body)


def _legend() -> Iterator[str]:
    """A patch for each colour, with the loads between them."""
    y, x, wide = 76, float(MARGIN), 44
    yield label(x, y + 11.5, "load over the mean")
    x += 130
    yield rect(x, y, wide, 14, f'fill="{COLOURS[0]}"')
    yield label(x + wide / 2, y + 28, "0: dead", size=11, ink=FAINT, more=MIDDLE)
    x += wide + 14
    for i, colour in enumerate(COLOURS[1:]):
        yield rect(x + i * wide, y, wide, 14, f'fill="{colour}"')
    for i, bound in enumerate(BOUNDS, 1):
        yield label(x + i * wide, y + 28, f"{bound:g}", size=11, ink=FAINT, more=MIDDLE)
    yield label(x + 10 * wide, y + 28, "more", size=11, ink=FAINT, more=END)


def _panel(layer: Layer, look: _Look) -> Iterator[str]:
    edges = look.columns.edges(layer, look.width)
    load = look.columns.summed(layer)  # [columns, experts]
    dead = int((load[-1] == 0).sum())
    name = printable(layer.name, max(8, (look.width - 110) // 8))
    yield label(0, 12, escape(name), size=13, more=' font-weight="600"')
    if dead:
        told = f"{dead} dead at the end"
        yield label(look.width, 12, told, size=11, ink=FAINT, more=END)
    yield from _cells(level(load), edges, look)
    yield from _experts(layer.experts, look.row)
    y = _HEAD + layer.experts * look.row
    balance, dropped = layer.balance(), layer.dropped
    told = f"balance (log): last {balance[-1]:.2f}, mean {balance.mean():.2f}"
    yield label(0, y + 13, told, size=11)
    heights = np.log(np.maximum(balance, 1)) / math.log(look.balance)
    yield from _strip(heights, layer, look, y + _CAPTION, ("1", f"{look.balance:g}"))
    y += _CAPTION + _STRIP
    if look.dropped:
        told = f"dropped: last {_percent(dropped[-1])}, mean {_percent(dropped.mean())}"
        yield label(0, y + 13, told, size=11)
        marks = ("0", _percent(look.dropped))
        yield from _strip(dropped / look.dropped, layer, look, y + _CAPTION, marks)
        y += _CAPTION + _STRIP
    yield from _axis(look, y)


def _cells(levels: Ints, edges: Ints, look: _Look) -> Iterator[str]:
    """A line for each run of a colour in an expert's row, all of a colour in one path. Loads near
    the mean are the background's.
    """
    yield rect(0, _HEAD, edges[-1], levels.shape[1] * look.row, f'fill="{COLOURS[_MEAN]}"')
    paths: list[list[str]] = [[] for _ in COLOURS]
    pens = [(0, 0)] * len(COLOURS)  # where each path is
    for expert, row in enumerate(levels.T.tolist()):
        place, y = 0, expert * look.row
        for colour, run in groupby(row):
            start, place = place, place + sum(1 for _ in run)
            x, end = int(edges[start]), int(edges[place])
            if colour != _MEAN:
                paths[colour].append(f"m{x - pens[colour][0]} {y - pens[colour][1]}h{end - x}")
                pens[colour] = end, y
    middle = short(_HEAD + look.row / 2)
    yield f'<g fill="none" stroke-width="{look.row}" transform="translate(0 {middle})">'
    yield from (f'<path class="l{i}" d="{"".join(path)}"/>' for i, path in enumerate(paths) if path)
    yield "</g>"


def _experts(count: int, row: int) -> Iterator[str]:
    """Their numbers on the left, every n-th where all would not fit."""
    apart = next(n for e in range(31) if (n := 2**e) * row >= 13)
    for expert in range(0, count, apart):
        down = _HEAD + (expert + 0.5) * row + 4
        yield label(-6, down, str(expert), size=11, ink=FAINT, more=END)
    turned = f'{MIDDLE} transform="rotate(-90)"'
    yield label(-_HEAD - count * row / 2, -36, "expert", size=11, ink=FAINT, more=turned)


def _strip(
    values: Floats, layer: Layer, look: _Look, y: int, marks: tuple[str, str]
) -> Iterator[str]:
    """The mean of each column's values, and the range of them; `values` [n] are from 0 to 1, and
    `marks` is what stands at both.
    """
    starts = look.columns.starts(layer)[1]
    edges = look.columns.edges(layer, look.width)
    counts = np.diff([*starts, len(values)])
    mean = np.add.reduceat(values, starts) / counts
    least, most = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    yield rect(0, y, edges[-1], _STRIP, 'fill="#f6f8fa"')
    above, below = _stairs(edges, most, y), _stairs(edges[::-1], least[::-1], y)
    yield f'<path d="M{above}L{below}z" fill="#c9d1d9"/>'
    yield f'<path d="M{_stairs(edges, mean, y)}" fill="none" stroke="{INK}"/>'
    for mark, down in zip(marks, (_STRIP, 9), strict=True):
        yield label(-6, y + down, mark, size=11, ink=FAINT, more=END)


def _stairs(edges: Ints, values: Floats, y: int) -> str:
    """Points of a line that is level from each edge to the next."""
    heights = [short(y + _STRIP * (1 - value)) for value in values.tolist()]
    ends = zip(edges[:-1], edges[1:], heights, strict=True)
    flat = (f"{x} {height}H{end}" for x, end, height in ends)
    return "L".join(flat)


def _axis(look: _Look, y: int) -> Iterator[str]:
    """Steps, with marks in the middle of their place."""
    columns = look.columns
    per_step = look.width / (columns.count * columns.width)
    end = columns.first + columns.count * columns.width
    room = max(46, 8 * len(str(end)))
    apart = columns.apart * round_step(room / (per_step * columns.apart))
    yield f'<path d="M0 {y}H{look.width}" stroke="{FAINT}"/>'
    for step in range(-(-columns.first // apart) * apart, end, apart):
        x = (step - columns.first + columns.apart / 2) * per_step
        yield f'<path d="M{short(x)} {y}v5" stroke="{FAINT}"/>'
        yield label(x, y + 18, str(step), size=11, ink=FAINT, more=MIDDLE)
    yield label(-6, y + 18, "step", size=11, ink=FAINT, more=END)
