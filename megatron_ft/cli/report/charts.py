"""Charts as inline SVG, all above the same axis of time.  Pure.

Every text is escaped here, every number is formatted by us; colours are classes of the style.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megatron_ft.cli.report.curves import Curve, Point, thinned
from megatron_ft.supervisor.ledger import Incident, Ledger

WIDTH, LEFT, RIGHT = 1000, 64, 16
MOST_MARKS = 60
"""With more incidents, those of a moment are counted together."""
_COLUMNS = 460
_TICKS = 8
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def text_of(value: object) -> str:
    """Foreign text as HTML: escaped, with unprintable characters replaced."""
    shown = (c if c.isprintable() or c == "\n" else "\ufffd" for c in str(value))
    return escape("".join(shown))


def duration(seconds: float) -> str:
    """A time for people: its two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    place = next(i for i, (size, _) in enumerate(_UNITS) if whole >= size)
    (size, unit), (smaller, part) = _UNITS[place : place + 2]
    rest = whole % size // smaller
    return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")


def _step(most: float, ticks: int) -> float:
    """The smallest of 1, 2, 5, 10, ... (and their parts) that needs no more ticks than that."""
    power = 10.0 ** math.floor(math.log10(most / ticks))
    return power * next(factor for factor in (1, 2, 5, 10) if most / (power * factor) <= ticks)


@dataclass(frozen=True)
class Axis:
    """Seconds since the job's beginning, from left to right; ``wall`` of them, more than 0."""

    wall: float

    def x(self, seconds: float) -> float:
        return LEFT + min(max(seconds / self.wall, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def ticks(self, height: float) -> Iterator[str]:
        """The axis at a height."""
        size, unit = next((s, u) for s, u in _UNITS if self.wall >= 5 * s or s == 1)
        step = _step(self.wall / size, _TICKS)
        for number in range(int(self.wall / size / step) + 1):
            x = self.x(number * step * size)
            yield f'<path class="tick" d="M{x:.1f} {height:.1f}v4"/>'
            yield _text(x, height + 17, f"{number * step:g} {unit}", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text_of(text)}</text>'


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{text_of(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _box(css: str, x: float, y: float, width: float, height: float, title: str) -> str:
    return (
        f'<rect class="{css}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}">'
        f"<title>{text_of(title)}</title></rect>"
    )


def time_chart(axis: Axis, found: Ledger) -> str:
    """One bar from beginning to end, coloured by category; incidents above, incarnations below."""
    paths: dict[str, list[str]] = {}
    incarnations: dict[int, Point] = {}
    for span in found.spans:
        left, right = axis.x(span.start), axis.x(span.stop)
        width = right - left
        paths.setdefault(span.category, []).append(f"M{left:.2f} 22h{width:.2f}v40h-{width:.2f}z")
        incarnations[span.incarnation] = (incarnations.get(span.incarnation, (left,))[0], right)
    parts = [
        f'<path class="{name}" d="{"".join(pieces)}"><title>{name}</title></path>'
        for name, pieces in paths.items()
    ]
    for number, (left, right) in incarnations.items():
        if number and right - left > 12 and len(incarnations) <= MOST_MARKS:
            parts.append(
                _box("part", left + 0.5, 64, right - left - 1, 16, f"incarnation {number}")
            )
            parts.append(_text((left + right) / 2, 76, str(number), "middle"))
    return _svg(108, "Timeline", [*parts, *_marks(axis, found.incidents), *axis.ticks(84)])


def _marks(axis: Axis, incidents: Sequence[Incident]) -> Iterator[str]:
    """A triangle for each incident, or of many a column for those of one moment."""
    places: dict[int, list[Incident]] = {}
    few = len(incidents) <= MOST_MARKS
    for number, one in enumerate(incidents):
        places.setdefault(number if few else int(axis.x(one.at) / 8), []).append(one)
    most = max(map(len, places.values()), default=0)
    for place, found in places.items():
        one, x, count = found[0], axis.x(found[0].at), len(found)
        title = f"{one.kind} at {duration(one.at)}: {one.text[:200]}"
        if few:
            path = f'<path class="mark" d="M{x:.1f} 20l-5-10h10z">'
            yield f"{path}<title>{text_of(title)}</title></path>"
        else:
            yield _box("mark", 8 * place, 20 - 16 * count / most, 7, 16 * count / most, f"{count}")


def line_chart(
    axis: Axis,
    series: Mapping[str, Curve],
    label: str,
    faults: Sequence[Incident] = (),
    *,
    dots: bool = False,
    low: float = 0.0,
) -> str:
    """Curves by the class of their style, from ``low`` to their highest value."""
    top, bottom = 10, 130
    values = [value for curve in series.values() for piece in curve for _, value in piece]
    high = max([low, *values])
    step = _step((high - low) or 1.0, 4)
    if label.startswith("Iterations"):
        step = max(step, 1.0)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)

    def y(value: float) -> float:
        return bottom - (value / step - first) / (last - first) * (bottom - top)

    parts = []
    for number in range(first, last + 1):
        height = y(number * step)
        parts.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, height + 4, f"{number * step:,.10g}", "end"))
    columns = {round(axis.x(one.at)) for one in faults if len(faults) <= MOST_MARKS}
    parts += [f'<path class="fault" d="M{x} {top}V{bottom}"/>' for x in sorted(columns)]
    for css, curve in series.items():
        for piece in thinned(curve, axis.wall, _COLUMNS):
            places = [(axis.x(at), y(value)) for at, value in piece]
            parts += _dots(css, places) if dots else [_line(css, places)]
    return _svg(bottom + 22, label, [*parts, *axis.ticks(bottom)])


def _dots(css: str, places: Iterable[Point]) -> Iterator[str]:
    return (f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)


def _line(css: str, places: Sequence[Point]) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="line {css}" d="M{path}"/>' if places else ""


def stacked_bar(parts: Mapping[str, float], longest: float) -> str:
    """A horizontal bar of parts by the class of their style; ``longest`` fills the width."""
    boxes, left, scale = [], 0.0, WIDTH / longest if longest else 0.0
    for name, seconds in parts.items():
        width = max(seconds, 0.0) * scale
        if width:
            boxes.append(_box(name, left, 0, width, 18, f"{name} {duration(seconds)}"))
        left += width
    shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH} 18" preserveAspectRatio="none" role="img" '
        f'aria-label="{text_of(shown)}">{"".join(boxes)}</svg>'
    )
