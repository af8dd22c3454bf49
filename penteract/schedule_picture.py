"""A pipeline schedule drawn over time, as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penteract.parallel.pipeline.schedules import Action, Pair, Schedule
from penteract.parallel.pipeline.timeline import Span, Timeline
from penteract.parallel.pipeline.trace import KINDS
from penteract.svg import (
    FAINT,
    MARGIN,
    MIDDLE,
    document,
    ink_on,
    label,
    mix,
    printable,
    rect,
    round_step,
    short,
)

# Of the chunks of a rank, the first has the first colour and the last the second. The kinds differ
# in hue and lightness for the colour-blind, and in the face of their numbers for print without
# colours.
_FILL = {
    "F": ("#d3e8f8", "#79b5e3"),
    "B": ("#d0662a", "#96400d"),
    "I": ("#f7d774", "#e0a922"),
    "W": ("#4f9c81", "#1d6650"),
}
_FACE = {
    k: "font-style:italic;font-weight:700" if k in "IW" else "font-style:normal" for k in KINDS
}
_WIDTH, _LEFT, _RIGHT = 1200, 76, 72
_WIDEST_UNIT, _TEXT_COLUMNS = 40, 160
_DIGIT = 0.7  # width of a bold digit, in font sizes


@dataclass(frozen=True)
class _Look:
    """A schedule with its times, and what of them the drawings share."""

    plan: Schedule
    times: Timeline

    def chunks(self) -> int:
        """The most stages on a rank."""
        placement = self.plan.placement
        return max(placement.count(rank) for rank in set(placement))

    def chunk(self) -> list[int]:
        """Of each stage, how many earlier ones its rank holds."""
        placement = self.plan.placement
        return [placement[:stage].count(rank) for stage, rank in enumerate(placement)]

    def title(self) -> str:
        sizes = ((self.plan.ranks, "rank"), (self.chunks(), "chunk"))
        counted = [_counted(n, what) for n, what in sizes]
        work = _counted(self.plan.micro_batches, "micro-batch")
        return f"{printable(self.plan.kind)}: {', '.join(counted)}, {work}"

    def figures(self) -> str:
        peaks = self.times.peak_activations
        most = max(peaks)
        return (
            f"bubble {100 * self.times.bubble_fraction:.1f} % of {self.times.makespan:g} units; "
            f"at most {_counted(most, 'activation')} alive, on rank {peaks.index(most)}"
        )

    def kinds(self) -> list[str]:
        used = {a.kind for spans in self.times.spans for span in spans for a in _inside(span)}
        return [kind for kind in KINDS if kind in used]


def _inside(span: Span) -> tuple[Action, ...]:
    step = span.step
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('ch') else 's'}"


# --- text ---


def text(plan: Schedule, times: Timeline) -> str:
    """A line a rank. Where it would be too wide, a column is a kind instead of a numbered cell."""
    look = _Look(plan, times)
    chunk, letters = look.chunk(), look.chunks() > 1
    labels = [
        {a: f"{a.kind}{a.micro_batch}" + (chr(97 + chunk[a.stage] % 26) if letters else "")
         for a in _inside(span)} for spans in times.spans for span in spans
    ]  # fmt: skip
    cell = max((len(name) for row in labels for name in row.values()), default=1)
    units = round(times.makespan)
    numbered = cell * units <= _TEXT_COLUMNS
    per_unit = float(cell) if numbered else min(1.0, _TEXT_COLUMNS / max(units, 1))
    label = {a: name for row in labels for a, name in row.items()}
    lines = [look.title(), look.figures(), ""]
    digits = len(str(plan.ranks - 1))
    for rank, spans in enumerate(times.spans):
        line = ""
        for span in spans:
            start, end = round(span.start * per_unit), round(span.end * per_unit)
            line = line.ljust(start, ".")
            names = [label[a] if numbered else a.kind for a in _inside(span)]
            line += ("+".join(names).ljust(end - start, "-"))[: end - start]
        line = line.ljust(round(times.makespan * per_unit), ".")
        lines.append(f"rank {rank:<{digits}}  {line}  peak {times.peak_activations[rank]}")
    scale = f"a {'cell' if numbered else 'column'} is a unit"
    scale = scale if per_unit >= 1 else f"a column is {1 / per_unit:.3g} units"
    legend = [f"{kind} {KINDS[kind]}" for kind in look.kinds()]
    cells = "its micro-batch" + (" and chunk (a, b, …)" if letters else "")
    legend += [f"with {cells}"] if numbered else []
    return "\n".join([*lines, "", f"{', '.join(legend)}; - goes on, . idle; {scale}"])


# --- SVG ---


@dataclass(frozen=True)
class _Scale:
    """Where things lie, in pixels."""

    unit: float
    row: float
    gap: float
    top: float
    width: int

    def x(self, time: float) -> float:
        return _LEFT + time * self.unit

    def y(self, rank: int) -> float:
        return self.top + rank * (self.row + self.gap)


def svg(plan: Schedule, times: Timeline) -> str:
    """A drawing of at most 1200 pixels across: a row a rank, time to the right."""
    look = _Look(plan, times)
    room = _WIDTH - _LEFT - _RIGHT
    unit = min(_WIDEST_UNIT, room / max(times.makespan, 1))
    row, gap = (32.0, 6.0) if plan.ranks <= 16 else (18.0, 3.0)
    width = max(720, round(_LEFT + unit * times.makespan + _RIGHT))
    scale = _Scale(unit, row, gap, top=86, width=width)
    bottom = scale.y(plan.ranks)
    height = round(bottom + 68)
    return document(
        width,
        height,
        title=look.title(),
        figures=look.figures(),
        style=list(_style(look)),
        body=[
            *_rows(look, scale),
            *_axis(times.makespan, scale, bottom),
            *_legend(look, scale, bottom + 42),
        ],
    )


def _style(look: _Look) -> Iterator[str]:
    """Classes of the boxes (kind and chunk), and the pattern of idle time."""
    chunks = look.chunks()
    yield "<style>"
    for kind in look.kinds():
        for chunk in range(chunks):
            fill = mix(*_FILL[kind], part=chunk / (chunks - 1) if chunks > 1 else 0.5)
            yield f".{kind}{chunk}{{fill:{fill}}}"
            yield f".t{kind}{chunk}{{fill:{ink_on(fill)};text-anchor:middle;{_FACE[kind]}}}"
    yield "</style>"
    yield (
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f6f8fa"/>'
        '<path d="M0 0V6" stroke="#dde1e6" stroke-width="2"/></pattern></defs>'
    )


def _rows(look: _Look, scale: _Scale) -> Iterator[str]:
    """Each rank: its name, its idle background, its boxes and numbers, its peak."""
    end, chunk = scale.x(look.times.makespan), look.chunk()
    line = 'stroke="#ffffff" stroke-width="1"' if scale.unit >= 6 else ""
    yield label(end + 12, scale.top - 9, "peak", ink=FAINT)
    for rank, spans in enumerate(look.times.spans):
        y = scale.y(rank)
        middle = y + scale.row / 2 + 4.5
        yield label(MARGIN, middle, f"rank {rank}")
        yield label(end + 12, middle, str(look.times.peak_activations[rank]))
        yield rect(_LEFT, y, end - _LEFT, scale.row, 'fill="url(#idle)"')
        yield f"<g {line}>" if line else "<g>"
        boxes = [box for span in spans for box in _boxes(span, y, chunk, scale)]
        for (x, top, across, down), name, _ in boxes:
            yield rect(x, top, across, down, f'class="{name}"')
        yield "</g>"
        size = min(12.0, scale.row * 0.62)
        yield f'<g font-size="{short(size)}">'
        for (x, top, across, down), name, number in boxes:
            fits = min(size, down * 0.78, (across - 3) / (_DIGIT * len(number)))
            if fits < 7:
                continue  # too small to read
            smaller = f' font-size="{short(fits)}"' if fits < size else ""
            place = f'x="{short(x + across / 2)}" y="{short(top + down / 2 + 0.36 * fits)}"'
            yield f'<text {place} class="t{name}"{smaller}>{number}</text>'
        yield "</g>"


Box = tuple[tuple[float, float, float, float], str, str]  # (x, y, width, height), class, number


def _boxes(span: Span, y: float, chunk: Sequence[int], scale: _Scale) -> Iterator[Box]:
    """One box, or for a pair two, the forward above the backward."""
    inside = _inside(span)
    down = scale.row / len(inside)
    for i, action in enumerate(inside):
        place = (scale.x(span.start), y + i * down, (span.end - span.start) * scale.unit, down)
        yield place, f"{action.kind}{chunk[action.stage]}", str(action.micro_batch)


def _axis(makespan: float, scale: _Scale, y: float) -> Iterator[str]:
    """Time below the rows, with marks at round numbers and at the end."""
    right = scale.x(makespan)
    yield f'<path d="M{_LEFT} {short(y)}H{short(right)}" stroke="{FAINT}"/>'
    step = round_step(46 / scale.unit)
    times = range(0, int(makespan) + 1, step)
    for time in [*(t for t in times if (makespan - t) * scale.unit > 30), makespan]:
        x = scale.x(time)
        yield f'<path d="M{short(x)} {short(y)}v5" stroke="{FAINT}"/>'
        yield label(x, y + 19, f"{time:g}", size=11, ink=FAINT, more=MIDDLE)
    yield label(MARGIN, y + 19, "time", size=11, ink=FAINT)


def _legend(look: _Look, scale: _Scale, y: float) -> Iterator[str]:
    """A patch for each kind in the shades of its chunks, and one for idle time."""
    x, chunks = float(MARGIN), look.chunks()
    shown = sorted({*range(min(chunks, 4)), chunks - 1})
    for kind in look.kinds():
        for chunk in shown:
            yield rect(x, y, 14, 14, f'class="{kind}{chunk}"')
            x += 15
        yield label(x + 5, y + 11.5, KINDS[kind], more=f' style="{_FACE[kind]}"')
        x += 26 + 7.3 * len(KINDS[kind])
    yield rect(x, y, 14, 14, 'fill="url(#idle)"')
    yield label(x + 20, y + 11.5, "idle")
    if chunks > 1:
        note = f"shades: chunks 0 to {chunks - 1}"
        yield label(x + 62, y + 11.5, note, ink=FAINT)
