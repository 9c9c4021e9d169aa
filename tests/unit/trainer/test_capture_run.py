"""One capture between the training thread and the copy thread."""

from __future__ import annotations

from threading import Event, Thread

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SnapshotId
from megatron_ft.trainer.capture_run import CaptureRun
from megatron_ft.trainer.ticket import Ticket

WAIT = 30.0
SNAPSHOT = SnapshotId(1, 1)


def begun() -> CaptureRun:
    permit = Permit(SNAPSHOT, iteration=3, slot=0, revoked=False)
    return CaptureRun(permit, Ticket(3, SNAPSHOT), {}, [], None, b"")


class After(Event):
    """Set, and seen to be set only once something else has happened."""

    def __init__(self, other: Event) -> None:
        super().__init__()
        self.other = other

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) and self.other.wait(WAIT)


class Telling(Event):
    """Says that somebody waits for it."""

    def __init__(self, awaited: Event) -> None:
        super().__init__()
        self.awaited = awaited

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        # However slow this machine is: the order counts here, not the time.
        return super().wait(WAIT)


def test_digests_wait_until_training_has_left_its_fence() -> None:
    run, released = begun(), Event()
    run.moved, run._fence_left = After(released), Telling(released)
    training = Thread(target=run.wait_moved, args=(WAIT,), daemon=True)
    training.start()
    while run._fence_entered is None:
        training.join(0.001)
        assert training.is_alive()
    assert run.end_copy(0.0, True, "")
    run.let_training_go()
    left = run._fence_left.is_set()
    released.set()
    training.join(WAIT)
    assert left and not training.is_alive()


def test_digests_do_not_wait_for_training_that_is_not_in_its_fence() -> None:
    run, asked = begun(), Event()
    run._fence_left = Telling(asked)
    assert run.end_copy(0.0, True, "")
    run.let_training_go()
    assert not asked.is_set()


def test_a_training_thread_that_never_runs_again_holds_up_no_snapshot() -> None:
    run = begun()
    run.moved.set()
    run.wait_moved(WAIT)
    run._fence_left.clear()
    digesting = Thread(target=run.let_training_go, daemon=True)
    digesting.start()
    digesting.join(WAIT)
    assert not digesting.is_alive(), "digests wait for a fence that nobody leaves"
    assert not run._fence_left.is_set()


def test_a_stop_before_the_copy_has_ended_wins() -> None:
    run = begun()
    assert run.stop("too slow") and run.stop("again")
    assert not run.end_copy(0.0, True, "")
    assert run.moved.is_set() and run.stop_reason == "too slow"


def test_a_stop_after_the_copy_has_ended_changes_nothing() -> None:
    run = begun()
    assert run.end_copy(0.0, True, "")
    assert not run.stop("too late")
    assert run.stop_reason == ""
