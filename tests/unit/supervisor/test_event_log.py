"""Events on disk: torn and foreign lines, a full disk, two supervisors and two jobs in turn."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli.report.page import page
from megatron_ft.core.identity import SHRINK
from megatron_ft.supervisor.event_log import EventLog, line_of, read_events
from megatron_ft.supervisor.events import CommittedEvent, JobEvent
from megatron_ft.supervisor.ledger import ledger
from megatron_ft.supervisor.recovery_cost import DRAIN, GROW, HOST, QUEUE, SPARE, START
from megatron_ft.supervisor.recovery_policy import MeasuredTimes


def texts(path: Path) -> list[str]:
    return [event.text for event in read_events(path).events]


def test_events_come_back_with_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "a").record(JobEvent("committed", "first", {"iteration": 4}, 12.5))
    (event,) = read_events(path).events
    assert (event.kind, event.at, event.facts) == ("committed", 12.5, CommittedEvent(iteration=4))
    assert path.stat().st_mode & 0o777 == 0o600


def test_torn_and_foreign_lines_cost_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "a").record(JobEvent("x", "first"))
    with path.open("ab") as file:
        file.write(b'[]\nnonsense\n{"kind": "x"}\n{"time": 1, "at": 2, "job": "a", "ki')
    EventLog(path, "a").record(JobEvent("x", "second"))
    assert texts(path) == ["first", "second"] and read_events(path).foreign == 4


def test_only_the_newest_job_of_a_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for job in "ab":
        EventLog(path, job).record(JobEvent("x", f"of {job}"))
    assert texts(path) == ["of b"]
    assert read_events(tmp_path / "none").events == ()


@pytest.mark.parametrize("written", [None, 0, 7])
def test_a_full_disk_delays_events_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    path, log, real = tmp_path / "events.jsonl", EventLog(tmp_path / "events.jsonl"), os.write

    def full(descriptor: int, data: Any) -> int:
        if written is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:written])

    log.record(JobEvent("x", "first"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log.record(JobEvent("x", "second"))
        log.record(JobEvent("x", "third"))
    log.record(JobEvent("x", "fourth"))
    assert texts(path) == ["first", "second", "third", "fourth"]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "gone" / "events.jsonl")
    log.record(JobEvent("x", "first"))
    (tmp_path / "gone").mkdir()
    log.record(JobEvent("x", "second"))
    assert texts(tmp_path / "gone" / "events.jsonl") == ["first", "second"]


def test_values_that_json_does_not_know_are_text(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).record(JobEvent("x", "path", {"folder": tmp_path}))
    assert json.loads(path.read_text())["folder"] == str(tmp_path)


LINES = [
    line_of(JobEvent(kind, "text", fields, 1.0 + at), "job", 1)
    for at, (kind, fields) in enumerate(
        [
            ("supervising", {"pid": 1}),
            ("training", {"iteration": 0}),
            ("committed", {"iteration": 4, "level": "protected", "stall": 0.1}),
            ("incarnation_ended", {"reached": 5, "ago": 0.1, "cause": "a hang", "node": "n0"}),
            ("autopsy", {"rank": 1, "node": "n0", "verdict": "hang"}),
            ("backoff", {"seconds": 1.0}),
            ("restoring", {"iteration": 4, "source": "parity", "iterations_lost": 1}),
            ("training", {"iteration": 4}),
            ("recovered", {"detect": 0.5, "kill": 0.1, "decide": 0.1, "start": 1.0}),
            ("caught_up", {"iteration": 5, "ago": 0.2}),
            ("committed", {"iteration": 8, "level": "local"}),
            ("incarnation_ended", {"reached": 9, "ago": 0.0, "asked": True}),
        ]
    )
]
WRONG: list[Any] = [
    *(None, True, -1, -2, 0.5, 10**400, 1 << 60, 1e308, -1e9, float("nan"), float("inf")),
    *("", "x", "\ud800", [], [1], {}, {"a": 1}),
]


def mutated(line: bytes, field: int, value: Any, how: str) -> bytes:
    """One line with one field set to another value, or damaged as text."""
    given = json.loads(line)
    name = sorted(given)[field % len(given)]
    if how == "value":
        given[name] = value
    elif how == "missing":
        del given[name]
    elif how == "brackets":
        return b"[" * 100_000
    elif how == "nested":
        return line[:-2] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    else:
        return line[: field % len(line)] + b"\xff\x00" + line[field % len(line) :].rstrip(b"\n")
    return json.dumps(given).encode()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(LINES),
            st.integers(0, 400),
            st.sampled_from(WRONG),
            st.sampled_from(["value", "value", "value", "missing", "bytes", "brackets", "nested"]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, len(LINES)),
)
def test_no_line_breaks_a_reader(changes: list[tuple[bytes, int, Any, str]], at: int) -> None:
    """What the ledger, the report and a recovery make of the events, they make of any file."""
    broken = [mutated(*one) + b"\n" for one in changes]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(b"".join([*LINES[:at], *broken, *LINES[at:]]))
        path.chmod(0o600)
        found = read_events(path)
    assert found.events
    json.dumps(ledger(found.events).to_dict()).encode()
    page("job", found.events, 2e9).encode()
    times = MeasuredTimes(found.events, True)
    for name in (SPARE, SHRINK, GROW, START, DRAIN, HOST, QUEUE):
        assert times.estimate(name).seconds >= 0
