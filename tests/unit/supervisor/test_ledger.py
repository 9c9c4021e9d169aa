"""The ledger: every second in one category, whatever the order of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.supervisor.event_log import LoggedEvent, event_of
from megatron_ft.supervisor.ledger import CATEGORIES, Ledger, ledger, timeline

Event = LoggedEvent


def event(at: float, kind: str, incarnation: int = 1, **fields: Any) -> Event:
    line = {"time": 5000 + at, "at": at, "job": "j", "kind": kind, "text": kind}
    return event_of({**line, "incarnation": incarnation, **fields})


def begun(at: float = 0.0) -> list[Event]:
    return [
        event(at, "supervising"),
        event(at + 1, "trainers_started"),
        event(at + 4, "training", iteration=0),
    ]


def ended(at: float, **fields: Any) -> Event:
    given = {"cause": "a trainer was killed by signal 9", "node": "n1", "reached": 20, "ago": 0.0}
    return event(at, "incarnation_ended", **{**given, **fields})


def again(at: float, restored: int = 18, incarnation: int = 2) -> list[Event]:
    """Decided after 1 s, rebuilt for 2 s, started for 3 s."""
    return [
        event(
            at + 1, "restoring", incarnation, iteration=restored, source="parity", iterations_lost=2
        ),
        event(at + 3, "trainers_started", incarnation),
        event(at + 6, "training", incarnation, iteration=restored),
    ]


def test_an_autopsy_names_the_incident() -> None:
    verdict = {"rank": 2, "node": "n2", "verdict": "out of memory"}
    events = [*begun(), ended(20), event(20.1, "autopsy", **verdict), *again(20)]
    (one,) = ledger(events).incidents
    assert (one.kind, one.node) == ("out of memory", "n2")
    unknown = {"rank": -1, "node": "", "verdict": "unknown"}
    events = [*begun(), ended(20), event(20.1, "autopsy", **unknown), *again(20)]
    (one,) = ledger(events).incidents
    assert (one.kind, one.node) == ("signal", "n1")


def spent(found: Ledger) -> dict[str, float]:
    return {name: seconds for name, seconds in found.seconds().items() if seconds}


def test_a_job_that_nothing_hits() -> None:
    found = ledger([*begun(), event(10, "committed", stall=0.25), event(24, "finished")])
    assert spent(found) == {"start": 4, "productive": 19.75, "stall": 0.25}
    assert found.ettr == 19.75 / 24 and found.incidents == []


def test_a_failure_in_all_its_parts() -> None:
    story = [
        *begun(),
        ended(20.5, ago=0.5),
        *again(20),
        event(27, "recovered", 2, detect=1.5),
        event(28.5, "caught_up", 2, ago=0.5),
        event(38, "finished", 2),
    ]
    found = ledger(story)
    assert spent(found) == {
        "start": 4 + 3,
        "productive": 14.5 + 10,
        "detect": 1.5,
        "decide": 1,
        "rebuild": 2,
        "redone": 2,
    }
    (one,) = found.incidents
    assert (one.kind, one.node, one.at, one.down, one.redone) == ("signal", "n1", 20, 6, 2)
    assert (one.iteration, one.source, one.lost) == (18, "parity", 2)
    assert found.seconds(1)["productive"] == 14.5


def test_a_second_failure_before_the_first_is_made_up_for() -> None:
    story = [
        *begun(),
        ended(20),
        *again(20),
        ended(27),
        *again(27, 18, 3),
        event(40, "finished", 3),
    ]
    found = ledger(story)
    assert found.seconds()["redone"] == 1 + 7 and len(found.incidents) == 2


def test_waits_holds_and_times_without_a_supervisor() -> None:
    story = [
        *begun(),
        ended(10, cause="ranks did not register"),
        event(11, "backoff", seconds=3.0),
        *again(15),
        ended(25, cause="a node was lost"),
        event(26, "holding"),
        event(56, "host"),
        event(57, "restoring", iteration=1),
        event(58, "trainers_started"),
        event(59, "training", iteration=20),
        event(1.0, "supervising")._replace(time=5100.0),
        event(3.0, "trainers_started")._replace(time=5102.0),
        event(9.0, "finished")._replace(time=5108.0),
    ]
    found = ledger(story)
    assert found.seconds()["idle"] == 3 and found.seconds()["hold"] == 31
    assert found.seconds()["queue"] == 41 and found.wall == 108
    assert [one.kind for one in found.incidents] == ["launcher", "node loss"]


def test_a_wall_clock_that_is_set_back_makes_no_time_negative() -> None:
    later = [one._replace(time=one.time - 4000) for one in begun(500.0)]
    times = [at for at, _ in timeline([*begun(), *later])]
    assert times == [0, 1, 4, 4, 5, 8]


def test_a_node_of_which_a_daemon_was_missed_first() -> None:
    cause = {"cause": "a snapshot daemon was not replaced", "node": "n0"}
    (one,) = ledger([*begun(), ended(9, **cause), event(9.1, "node_lost", node="n0")]).incidents
    assert (one.kind, one.node, one.down) == ("node loss", "n0", 0)


def test_an_end_that_the_user_wanted_is_no_incident() -> None:
    assert ledger([*begun(), ended(9, asked=True), *again(9)]).incidents == []


@pytest.mark.parametrize("events", [[], begun()[:1]])
def test_a_job_without_time_has_no_share(events: list[Event]) -> None:
    assert ledger(events).ettr == 0 and ledger(events).wall == 0


KINDS: Mapping[str, Mapping[str, Any]] = {
    "supervising": {},
    "trainers_started": {},
    "training": {"iteration": 3},
    "committed": {"stall": 0.5},
    "incarnation_ended": {"cause": "a hang", "reached": 9, "ago": 0.3},
    "backoff": {"seconds": 2.0},
    "holding": {},
    "restoring": {"iteration": 3},
    "caught_up": {"ago": 5.0},
    "recovered": {"detect": 4.0},
    "something newer": {},
}


@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.floats(0, 100), st.booleans())))
def test_categories_add_up_to_the_wall_time(told: list[tuple[str, float, bool]]) -> None:
    now, events = 0.0, begun()
    for kind, seconds, moved in told:
        now += seconds
        made = event(4 + now, kind, **KINDS[kind])
        events.append(made._replace(time=made.time + 50 * moved))
    found = ledger(events)
    *_, last = timeline(events)
    assert found.wall == pytest.approx(last[0])
    assert sum(found.seconds().values()) == pytest.approx(found.wall)
    assert all(seconds >= 0 for seconds in found.seconds().values())
    assert found.seconds().keys() == CATEGORIES.keys()
    assert all(a.stop == b.start for a, b in zip(found.spans, found.spans[1:], strict=False))


def test_an_evacuation_leaves_the_incident_before_it_as_it_was() -> None:
    moved = {"asked": True, "cause": "", "reached": 30, "ago": 0.0}
    before = [*begun(), ended(20), *again(20), event(28, "caught_up", 2, ago=0.5)]
    evacuated = event(40, "restoring", 3, iteration=99, source="own memory", iterations_lost=0)
    after = [
        event(39, "incarnation_ended", 2, **moved),
        evacuated,
        event(41, "trainers_started", 3),
        event(42, "training", 3, iteration=99),
        event(43, "caught_up", 3, ago=0.1),
        event(43.5, "autopsy", 3, rank=1, node="n9", verdict="hang"),
    ]
    assert ledger([*before, *after]).incidents == ledger(before).incidents


@given(
    st.lists(st.tuples(st.sampled_from(sorted({*KINDS, "autopsy", "node_lost"})), st.booleans())),
    st.integers(0, 40),
)
def test_closed_incidents_never_change(told: list[tuple[str, bool]], cut: int) -> None:
    """Once another incarnation has ended, whether asked or not, those before it are history."""
    more = {"autopsy": {"rank": 1, "node": "n7", "verdict": "x"}, "node_lost": {"node": "n8"}}
    events = begun()
    for number, (kind, asked) in enumerate(told):
        given = {**KINDS, **more}[kind]
        own = {"asked": asked} if kind == "incarnation_ended" else {}
        own |= {"source": f"s{number}"} if kind == "restoring" else {}
        events.append(event(5.0 + number, kind, **{**given, **own}))
    part = events[: 3 + cut]
    while part and part[-1].kind != "incarnation_ended":
        part.pop()
    closed = [one for one in ledger(part).incidents if one.down]
    assert ledger(events).incidents[: len(closed)] == closed
