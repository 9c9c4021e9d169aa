"""Kinds of events: all that are emitted are listed, documented, and can be notified of."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from megatron_ft.cli.common import say
from megatron_ft.cli.console import Console
from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor import notify
from megatron_ft.supervisor.events import FACTS, KINDS, CommittedEvent, JobEvent, Observers
from megatron_ft.supervisor.notify import DEFAULT_KINDS, Notifier, kinds_of
from tests.support.jobs import ROOT

EMITTERS = ("emit", "_emit")
MADE_OF_VARIABLES = {
    *("supervising", "paused", "resumed", "exposed", "protected_again"),
    *("evacuating", "evacuated", "not_evacuated", "undone", "grown"),
}
STRUCTS = {facts.__name__: kind for kind, facts in FACTS.items()}


def emitted() -> Iterator[str]:
    """Kinds that stand in the code as they are, or that are made of their facts."""
    for path in [*(ROOT / "megatron_ft").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in STRUCTS:
                yield STRUCTS[name]
            kinds = node.args[3:4] if name == "_try" else node.args[:1]
            if name in (*EMITTERS, "_try"):
                for kind in kinds:
                    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                        assert kind.value not in FACTS, f"{path}: {kind.value} needs its facts"
                        yield kind.value


def test_every_kind_is_listed_and_every_listed_one_is_emitted() -> None:
    assert {*emitted(), *MADE_OF_VARIABLES} == set(KINDS)


def test_the_docs_list_all_kinds() -> None:
    text = (ROOT / "docs" / "reference" / "events.md").read_text()
    for kind, happened in KINDS.items():
        assert f"| `{kind}` | {happened} |" in text


def test_a_kind_that_does_not_exist_is_refused() -> None:
    assert set(DEFAULT_KINDS) <= set(KINDS)
    assert kinds_of("hang, stopped") == ("hang", "stopped")
    with pytest.raises(ConfigError, match=r"no event node_los; the kinds are .*node_lost"):
        kinds_of("hang,node_los")
    with pytest.raises(ConfigError, match="no event named"):
        kinds_of(" ,")


class Led:
    """The part of a Fleet that a notifier needs."""

    incarnation = 3

    def __init__(self) -> None:
        self.observers = Observers()


def test_a_command_gets_each_event_of_its_kinds_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    led, file = Led(), tmp_path / "told"
    command = f"cat >> {file}; exit 1"
    notifier = Notifier(command, ("hang", "stopped"), "a", led)  # type: ignore[arg-type]
    for kind in ("hang", "committed", "stopped"):
        led.observers.emit(kind, f"about {kind}", iteration=4)
    notifier.close()
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["kind"], one["text"], one["iteration"]) for one in told] == [
        ("hang", "about hang", 4),
        ("stopped", "about stopped", 4),
    ]
    assert {one["incarnation"] for one in told} == {3} and {one["job"] for one in told} == {"a"}


def test_a_command_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.3)
    led, file = Led(), tmp_path / "told"
    command = f"read line; test -e {file} || {{ touch {file}; exec sleep 600; }}; echo >> {file}"
    notifier = Notifier(command, ("hang",), "a", led)  # type: ignore[arg-type]
    for _ in range(notify._MOST_WAITING + 3):
        led.observers.emit("hang", "again")
    assert "no notification of hang: 100 events wait" in caplog.text
    notifier.close(60.0)
    assert not any(thread.name == "megatron-ft-notify" for thread in threading.enumerate())
    assert "timed out" in caplog.text
    assert len(file.read_text()) >= notify._MOST_WAITING - 1, "those behind it are run"


def test_a_log_on_a_full_disk_stops_nobody() -> None:
    heard: list[JobEvent] = []
    observers = Observers()
    observers.subscribe(Console(say).on_event)
    observers.subscribe(heard.append)
    # What is written to this device meets a disk without space (full(4)), also when it is closed.
    with suppress(OSError), open("/dev/full", "w") as full, redirect_stdout(full):
        observers.emit(CommittedEvent(level="local"), "snapshot of iteration 4 committed")
        observers.emit("training", "training")
    assert [event.kind for event in heard] == ["committed", "training"]


def test_who_failed_once_is_told_the_next_event() -> None:
    heard: list[str] = []

    def fails_first(event: JobEvent) -> None:
        heard.append(event.kind)
        if len(heard) == 1:
            raise OSError("no space left on device")

    observers = Observers()
    observers.subscribe(fails_first)
    observers.emit("training", "training")
    observers.emit("finished", "finished")
    assert heard == ["training", "finished"]
