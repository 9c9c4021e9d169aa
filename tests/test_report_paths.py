"""Reports that go up through relays come once and in order, whatever happens to relays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from report_paths import SCRIPTS, explore

from megatron_ft.coordinator.inbox import Inbox
from megatron_ft.identity import SnapshotId
from megatron_ft.smp import messages as m
from megatron_ft.smp.gathering import Gathering
from megatron_ft.smp.outbox import MOST_UNHEARD, Outbox, report, reported

ONE, TWO = SnapshotId(1, 1), SnapshotId(1, 2)


def forgotten(self: Outbox, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
    """What relays were given is kept nowhere."""
    event = RELAYED(self, node, incarnation, bodies)
    self.unheard, self.behind = [], 0
    return event


def entrusted(self: Outbox, node: str, incarnation: int, bodies: list[Any]) -> m.Event:
    """What goes directly is as safe as a connection."""
    event = DIRECT(self, node, incarnation, bodies)
    self.unheard = []
    return event


def confirmed_by_any(self: Outbox, stream: int, number: int) -> None:
    """A heartbeat to the SMP before this one counts."""
    HEARD(self, self.stream, number)


def taken_with_gaps(self: Inbox, event: m.Event) -> list[m.Event]:
    """What came before it may come later."""
    new = [one for one in reported(event) if one.first > self.number]
    self.number = new[-1].first if new else self.number
    return new


def taken_from_any(self: Inbox, event: m.Event) -> list[m.Event]:
    """Words of an SMP that was replaced are taken for those of its successor."""
    return self._new(event)


def taken_again(self: Inbox, event: m.Event) -> list[m.Event]:
    """What has come is taken again."""
    return reported(event)


DIRECT, RELAYED, HEARD = Outbox.direct, Outbox.relayed, Outbox.heard
Mistake = tuple[type, str, Callable[..., Any], str]
URGENT, REPORTS, REPLACED, RESET = SCRIPTS
LEAST = {REPLACED: 2500, RESET: 4000}
MISTAKES: list[Mistake] = [
    (Outbox, "direct", entrusted, RESET),
    (Outbox, "relayed", forgotten, URGENT),
    (Outbox, "heard", confirmed_by_any, URGENT),
    (Inbox, "_new", taken_with_gaps, REPORTS),
    (Inbox, "_new", taken_with_gaps, RESET),
    (Inbox, "relayed", taken_from_any, REPLACED),
    (Inbox, "_new", taken_again, URGENT),
]


def gathered(node: str, frame: str, snapshot: SnapshotId = ONE, whole: bool = True) -> m.Gathered:
    return m.Gathered(1, node, snapshot, whole, (frame.encode(),))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_order_of_steps_brings_everything_once_and_in_its_order(name: str) -> None:
    assert explore(SCRIPTS[name]) > LEAST.get(name, 10000)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m[2].__name__} {m[3]}")
def test_each_mistake_is_found(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    of, name, instead, script = mistake
    monkeypatch.setattr(of, name, instead)
    with pytest.raises(AssertionError, match="was heard as|came"):
        explore(SCRIPTS[script])


def test_a_branch_is_one_message() -> None:
    gathering = Gathering()
    gathering.begin(ONE, b"above", ("r", "b", "c"))
    assert not gathering.add(gathered("b", "1"))
    assert not gathering.add(gathered("r", "2"))
    assert gathering.add(gathered("c", "3"))
    assert gathering.take("r", 1) == m.Gathered(1, "r", ONE, True, (b"1", b"2", b"3"))
    assert gathering.take("r", 1) is None
    gathering.begin(ONE, b"above", ("r", "b"))
    assert not gathering.add(gathered("r", "4")), "the next round on the same snapshot"
    assert gathering.add(gathered("b", "5"))


def test_what_is_missing_comes_after_the_rest_and_says_so() -> None:
    gathering = Gathering()
    gathering.begin(ONE, b"above", ("r", "b"))
    gathering.add(gathered("r", "1"))
    assert gathering.take("r", 1) == m.Gathered(1, "r", ONE, False, (b"1",))
    assert not gathering.add(gathered("b", "2", whole=False)), "a part of the branch below"
    assert gathering.add(gathered("b", "3"))
    assert gathering.take("r", 1) == m.Gathered(1, "r", ONE, True, (b"2", b"3"))


def test_late_words_wait_for_nobody_and_an_older_request_changes_nothing() -> None:
    gathering = Gathering()
    gathering.begin(TWO, b"above", ("r", "b"))
    gathering.begin(ONE, b"late", ("r", "b"))
    assert gathering.above == b"above" and gathering.takes(TWO) and not gathering.takes(ONE)
    assert gathering.add(gathered("b", "1", ONE)) and gathering.missing == {"r", "b"}
    gathering.end()
    assert not gathering.takes(TWO) and not gathering.takes(None)
    assert gathering.add(gathered("b", "2", TWO))


def test_what_no_heartbeat_names_is_overdue_and_told_again() -> None:
    outbox = Outbox(7)
    assert not any(outbox.overdue() for _ in range(9)), "nothing was told"
    outbox.direct("n0", 1, [word("a")])
    outbox.relayed("n0", 1, [word("b"), word("c")])
    assert [outbox.overdue() for _ in range(MOST_UNHEARD)] == [False] * (MOST_UNHEARD - 1) + [True]
    outbox.heard(7, 2)
    assert outbox.unheard == [word("c")]
    assert [outbox.overdue() for _ in range(MOST_UNHEARD)][-1]
    outbox.heard(6, 3)
    for _ in range(2):
        assert outbox.again("n0", 1) == m.Event("n0", 1, word("c"), 7, 3)
        assert [outbox.overdue() for _ in range(MOST_UNHEARD)][-1], "that may be lost as well"
    outbox.heard(7, 3)
    assert not outbox.unheard and not outbox.overdue()


def test_what_goes_directly_takes_along_what_relays_were_given_and_nothing_else() -> None:
    outbox = Outbox(7)
    outbox.direct("n0", 1, [word("a")])
    outbox.relayed("n0", 1, [word("b")])
    outbox.relayed("n0", 1, [word("c")])
    along = m.NodeReport((word("b"), word("c"), word("d")))
    assert outbox.direct("n0", 1, [word("d")]) == m.Event("n0", 1, along, 7, 2)
    assert outbox.direct("n0", 1, [word("e")]) == m.Event("n0", 1, word("e"), 7, 5)
    outbox.relayed("n0", 1, [word("f")])
    outbox.heard(7, 6)
    assert outbox.direct("n0", 1, [word("g")]) == m.Event("n0", 1, word("g"), 7, 7)


def test_a_report_is_unpacked_to_what_was_told() -> None:
    bodies = [word("a"), word("b")]
    for some in (bodies, bodies[:1]):
        event = m.decode(m.encode(m.Event("n0", 1, report(some), 7, 3)))
        assert reported(event) == [m.Event("n0", 1, b, 7, 3 + i) for i, b in enumerate(some)]


def test_what_a_connection_has_lost_is_waited_for() -> None:
    inbox = Inbox()
    assert not inbox.direct(m.Event("n0", 1, word("b"), 7, 2)), "1 was lost"
    both = m.NodeReport((word("a"), word("b")))
    assert [one.body for one in inbox.direct(m.Event("n0", 1, both, 7, 1))] == [*both.bodies]
    assert not inbox.relayed(m.Event("n0", 1, word("d"), 7, 4))
    assert inbox.direct(m.Event("n0", 1, word("a"), 8, 1)), "a new life"
    assert not inbox.relayed(m.Event("n0", 1, word("c"), 7, 3))


def word(name: str) -> Any:
    return m.OrderDone(ONE, name)
