"""The page about a job, section by section, from its events.  Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from string import Template

from megatron_ft.cli.report.charts import (
    MOST_MARKS,
    Axis,
    duration,
    line_chart,
    stacked_bar,
    text_of,
    time_chart,
)
from megatron_ft.cli.report.curves import Curves, curves
from megatron_ft.supervisor.event_log import LoggedEvent
from megatron_ft.supervisor.events import CommittedEvent, RecoveredEvent
from megatron_ft.supervisor.heartbeats import PARTS
from megatron_ft.supervisor.ledger import (
    CATEGORIES,
    SUPERVISING,
    Incident,
    Ledger,
    ledger,
    timeline,
)

MOST_BARS, MOST_INCIDENTS, MOST_EVENTS = 24, 100, 100
_LONGEST_TEXT = 600

_LEVELS = {
    "local": "since the newest snapshot that outlives a trainer",
    "protected": "since the newest snapshot that outlives a node",
}


def page(job: str, events: Sequence[LoggedEvent], now: float) -> str:
    """The HTML text; ``now`` is the moment, in seconds since 1970, that it names as its own."""
    found, name = ledger(events), text_of(job)
    parts = [_head(name, events, found, now), _ledger_section(found)]
    if found.wall:
        axis = Axis(found.wall)
        parts.insert(1, _timeline_section(axis, found))
        parts += [_recoveries(events), _progress(axis, curves(events), found.incidents)]
    parts += [_incidents(events, found.incidents), _last_events(events)]
    template = Template(Path(__file__).with_name("page.html").read_text())
    return template.substitute(name=name, body="\n".join(chain.from_iterable(parts)))


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _head(name: str, events: Sequence[LoggedEvent], found: Ledger, now: float) -> Iterator[str]:
    last = events[-1]
    committed = [e.facts.iteration for e in events if isinstance(e.facts, CommittedEvent)]
    facts = {
        "Wall time": duration(found.wall),
        "Productive (ETTR)": f"{found.ettr:.1%}",
        "Incidents": f"{len(found.incidents):,}",
        "Incarnations": f"{len(_incarnations(found)):,}",
        "Committed iteration": f"{committed[-1]:,}" if committed else "none",
    }
    tiles = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    began = next((event.text for event in events if event.kind == SUPERVISING), "")
    yield (
        f"<header><h1>{name}</h1><p>{text_of(began)}{'<br>' * bool(began)}"
        f"{_moment(events[0].time)} to {_moment(last.time)}; the last event: "
        f"{text_of(last.text[:_LONGEST_TEXT])}<br>generated at "
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now))}; times are of this zone"
        f"</p></header><dl>{tiles}</dl>"
    )


def _incarnations(found: Ledger) -> list[int]:
    return sorted({span.incarnation for span in found.spans if span.incarnation})


def _legend(names: Mapping[str, str]) -> str:
    items = "".join(f'<li><i class="{css}"></i>{words}</li>' for css, words in names.items())
    return f'<ul class="legend">{items}</ul>'


def _table(heads: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML; ``heads`` has the class of each column."""
    columns = [f'<td class="{css}">' for css in heads.values()]
    top = "".join(f'<th class="{css}">{head}</th>' for head, css in heads.items())
    lines = ("</td>".join(map("".join, zip(columns, row, strict=True))) for row in rows)
    body = "".join(f"<tr>{line}</td></tr>" for line in lines)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _left_out(shown: int, total: int, words: str) -> str:
    if shown == total:
        return ""
    return f'<p class="note">The newest {shown:,} of {total:,} {words}.</p>'


def _timeline_section(axis: Axis, found: Ledger) -> Iterator[str]:
    used = {name: name for name, seconds in found.seconds().items() if seconds and name != "stall"}
    note = "Below the bar: incarnations. A triangle is an incident."
    if len(found.incidents) > MOST_MARKS:
        note = "Columns above the bar count incidents."
    yield f"<section><h2>Timeline</h2>{_legend(used)}"
    yield time_chart(axis, found)
    yield f'<p class="note">{note}</p></section>'


def _ledger_section(found: Ledger) -> Iterator[str]:
    spent = {name: seconds for name, seconds in found.seconds().items() if seconds}
    rows = [
        (
            name,
            f"{seconds:,.2f} s",
            f"{seconds / found.wall:.1%}",
            stacked_bar({name: seconds}, max(spent.values())),
            CATEGORIES[name],
        )
        for name, seconds in spent.items()
    ]
    heads = {"Category": "", "Time": "n", "Share": "n", "": "b", "Meaning": ""}
    yield f"<section><h2>Where the time went</h2>{_table(heads, rows)}"
    numbers = _incarnations(found)
    if len(numbers) > 1:
        each = {number: found.seconds(number) for number in numbers[-MOST_BARS:]}
        longest = max(sum(seconds.values()) for seconds in each.values())
        bars = [
            (str(number), duration(sum(seconds.values())), stacked_bar(seconds, longest))
            for number, seconds in each.items()
        ]
        yield "<h3>By incarnation</h3>" + _left_out(len(bars), len(numbers), "incarnations")
        yield _table({"Incarnation": "", "Time": "n", "": "b wider"}, bars)
    yield "</section>"


def _recoveries(events: Sequence[LoggedEvent]) -> Iterator[str]:
    found = ((at, event.facts) for at, event in timeline(events))
    done = [(at, facts) for at, facts in found if isinstance(facts, RecoveredEvent)]
    if not done:
        return
    parts = [{name: getattr(facts, name) for name in PARTS} for _, facts in done]
    shown = [
        (_moment(events[0].time + at), f"{sum(one.values()):.2f} s", one)
        for (at, _), one in [*zip(done, parts, strict=True)][-MOST_BARS:]
    ]
    note = _left_out(len(shown), len(done), "recoveries; the median is of all")
    if len(done) > 1:
        middle = {name: median(one[name] for one in parts) for name in PARTS}
        shown.append(("median of each part", f"{sum(middle.values()):.2f} s", middle))
    longest = max(sum(one.values()) for _, _, one in shown)
    rows = [(at, total, stacked_bar(one, longest)) for at, total, one in shown]
    yield "<section><h2>Recoveries in parts</h2>" + _legend({name: name for name in PARTS})
    yield note + _table({"Training again at": "", "After": "n", "": "b wider"}, rows)
    yield "</section>"


def _progress(axis: Axis, found: Curves, incidents: Sequence[Incident]) -> Iterator[str]:
    values = [value for piece in found.reached for _, value in piece]
    if not found.committed or not values:
        return
    series = {"committed": [found.committed], "reached": found.reached}
    low = max(min(values), 0)
    yield "<section><h2>Progress</h2><h3>Iterations</h3>"
    yield _legend({"reached": "reached", "committed": "newest committed"})
    yield line_chart(axis, series, "Iterations over time", incidents, low=low, finest=1)
    if found.pace:
        yield "<h3>Seconds of an iteration</h3>"
        yield '<p class="note">The mean between two commits.</p>'
        pace = {"reached": [found.pace]}
        yield line_chart(axis, pace, "Seconds of an iteration", incidents, dots=True)
    exposed = found.exposed
    if len(exposed) == 2 and exposed["local"] == exposed["protected"]:
        del exposed["local"]
    yield "<h3>Exposure: seconds of training that a fault takes</h3>"
    yield _legend({name: _LEVELS[name] for name in exposed})
    yield '<p class="note">Counted from the commit; what is in it is a little older.</p>'
    yield line_chart(axis, exposed, "Exposure in seconds", incidents)
    yield "</section>"


def _incidents(events: Sequence[LoggedEvent], incidents: Sequence[Incident]) -> Iterator[str]:
    yield "<section><h2>Incidents</h2>"
    if not incidents:
        yield "<p>None.</p></section>"
        return
    if len(incidents) > MOST_BARS:
        yield "<h3>By kind</h3>" + _by_kind(incidents) + "<h3>One by one</h3>"
    shown = incidents[-MOST_INCIDENTS:]
    yield _left_out(len(shown), len(incidents), "incidents")
    heads = {"When": "", "Kind": "", "Node": "", "Cause": "t", "Restored": "", "Lost": "n"}
    rows = [
        (
            _moment(events[0].time + one.at),
            text_of(one.kind),
            text_of(one.node),
            text_of(one.text[:_LONGEST_TEXT]),
            text_of(f"{one.iteration} from {one.source}") if one.source else "",
            text_of(one.lost) if one.source else "",
            f"{one.down:.2f} s" if one.down else "not up again",
            f"{one.redone:.2f} s",
        )
        for one in shown
    ]
    yield _table({**heads, "Down": "n", "Redone": "n"}, rows) + "</section>"


def _by_kind(incidents: Sequence[Incident]) -> str:
    kinds: dict[str, list[float]] = {}
    for one in incidents:
        kinds.setdefault(one.kind, []).append(one.down)
    rows = [
        (text_of(kind), f"{len(down):,}", f"{median(down):.2f} s", f"{max(down):.2f} s")
        for kind, down in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    return _table({"Kind": "", "Number": "n", "Median down": "n", "Longest down": "n"}, rows)


def _last_events(events: Sequence[LoggedEvent]) -> Iterator[str]:
    others = [(at, event) for at, event in timeline(events) if event.kind != "committed"]
    shown = others[-MOST_EVENTS:]
    rows = [
        (
            _moment(events[0].time + at),
            text_of(event.incarnation),
            text_of(event.kind),
            text_of(event.text[:_LONGEST_TEXT] + " ..." * (len(event.text) > _LONGEST_TEXT)),
        )
        for at, event in shown
    ]
    yield "<section><h2>Events</h2>"
    yield _left_out(len(shown), len(others), "events")
    yield f'<p class="note">Without {len(events) - len(others):,} commits.</p>'
    yield _table({"When": "", "Incarnation": "n", "Kind": "", "Text": "t"}, rows) + "</section>"
