"""Events on disk: torn and foreign lines, a full disk, two supervisors and two jobs in turn."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.supervisor.event_log import EventLog, read_events
from megatron_ft.supervisor.events import JobEvent


def texts(path: Path) -> list[str]:
    return [event["text"] for event in read_events(path).events]


def test_events_come_back_with_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "a").record(JobEvent("committed", "first", {"iteration": 4}, 12.5))
    (event,) = read_events(path).events
    assert (event["kind"], event["iteration"], event["at"]) == ("committed", 4, 12.5)
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
