"""Those who are told of a job's events, and whose failures are their own."""

from __future__ import annotations

from contextlib import redirect_stdout, suppress

from megatron_ft.cli.run import Printer
from megatron_ft.supervisor.events import CommittedEvent, JobEvent, Observers


def test_a_log_on_a_full_disk_stops_nobody() -> None:
    heard: list[JobEvent] = []
    observers = Observers()
    observers.subscribe(Printer())
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
