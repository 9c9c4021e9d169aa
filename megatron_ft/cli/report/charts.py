"""Charts over a job's time as inline SVG and HTML.  Pure.

Every text is escaped here, every number is formatted by us; colours are classes of ``page.html``.
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
            yield _path("tick", f"M{x:.1f} {height:.1f}v4")
            yield _text(x, height + 17, f"{number * step:g} {unit}")


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{text_of(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _path(css: str, line: str, title: str = "") -> str:
    inner = title and f"<title>{text_of(title)}</title>"
    return f'<path class="{css}" d="{line}">{inner}</path>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text_of(text)}</text>'


def time_chart(axis: Axis, found: Ledger) -> str:
    """One bar from beginning to end, coloured by category; incidents above, incarnations below."""
    boxes: dict[str, str] = {}
    incarnations: dict[int, Point] = {}
    for span in found.spans:
        left, right = axis.x(span.start), axis.x(span.stop)
        boxes[span.category] = boxes.get(span.category, "") + _box(left, 22, right - left, 40)
        incarnations[span.incarnation] = (incarnations.get(span.incarnation, (left,))[0], right)
    parts = [_path(name, line, name) for name, line in boxes.items()]
    for number, (left, right) in incarnations.items():
        if number and right - left > 12 and len(incarnations) <= MOST_MARKS:
            box = _box(left + 0.5, 64, right - left - 1, 16)
            parts.append(_path("part", box, f"incarnation {number}"))
            parts.append(_text((left + right) / 2, 76, str(number)))
    return _svg(108, "Timeline", [*parts, *_marks(axis, found.incidents), *axis.ticks(84)])


def _marks(axis: Axis, incidents: Sequence[Incident]) -> Iterator[str]:
    """A triangle for each incident, or of many a column for those of one moment."""
    if len(incidents) <= MOST_MARKS:
        for one in incidents:
            title = f"{one.kind} at {duration(one.at)}: {one.text[:200]}"
            yield _path("mark", f"M{axis.x(one.at):.1f} 20l-5-10h10z", title)
        return
    counts: dict[int, int] = {}
    for one in incidents:
        place = int(axis.x(one.at) / 8)
        counts[place] = counts.get(place, 0) + 1
    for place, count in counts.items():
        height = 16 * count / max(counts.values())
        yield _path("mark", _box(8 * place, 20 - height, 7, height), f"{count}")


def line_chart(
    axis: Axis,
    series: Mapping[str, Curve],
    label: str,
    faults: Sequence[Incident],
    *,
    dots: bool = False,
    low: float = 0.0,
    finest: float = 0.0,
) -> str:
    """Curves by their class, from ``low`` to their highest value; ``finest`` is a least step."""
    top, bottom = 10, 130
    high = max(
        [low, *(value for curve in series.values() for piece in curve for _, value in piece)]
    )
    step = max(_step((high - low) or 1.0, 4), finest)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)

    def y(value: float) -> float:
        return bottom - (value / step - first) / (last - first) * (bottom - top)

    parts = []
    for number in range(first, last + 1):
        height = y(number * step)
        parts.append(_path("grid", f"M{LEFT} {height:.1f}H{WIDTH - RIGHT}"))
        parts.append(_text(LEFT - 8, height + 4, f"{number * step:,.10g}", "end"))
    columns = {round(axis.x(one.at)) for one in faults if len(faults) <= MOST_MARKS}
    parts += [_path("fault", f"M{x} {top}V{bottom}") for x in sorted(columns)]
    for css, curve in series.items():
        for piece in thinned(curve, axis.wall, _COLUMNS):
            places = [f"{axis.x(at):.1f} {y(value):.1f}" for at, value in piece]
            if dots:
                parts += [
                    _path(css, f"M{place}m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0") for place in places
                ]
            elif places:
                parts.append(_path(f"line {css}", f"M{'L'.join(places)}"))
    return _svg(bottom + 22, label, [*parts, *axis.ticks(bottom)])


def stacked_bar(parts: Mapping[str, float], longest: float) -> str:
    """A horizontal bar of parts by their class; ``longest`` seconds fill the width."""
    shown = {name: seconds for name, seconds in parts.items() if seconds > 0}
    titles = [f"{name} {duration(seconds)}" for name, seconds in shown.items()]
    pieces = (
        f'<i class="{name}" style="width:{seconds / longest:.3%}" title="{title}"></i>'
        for (name, seconds), title in zip(shown.items(), titles, strict=True)
    )
    label = ", ".join(titles)
    return f'<div class="bar" role="img" aria-label="{label}">{"".join(pieces)}</div>'
