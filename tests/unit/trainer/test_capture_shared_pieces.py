"""Pieces of one copy between the copy thread and a training thread that helps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_ft.trainer.engine
from megatron_ft.trainer.copier import SharedPieces
from megatron_ft.trainer.cpu import CpuCopier, SerialBatch
from megatron_ft.trainer.state import same_bits
from tests.support.captures import WAIT, FakeSmp, make_manager

SHORT = 0.2
"""Seconds in which something that must not happen would have happened many times."""


class Piece:
    """Notes who copied it, and whether torch would have remembered how."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.movers: list[int] = []
        self.graded = False
        self._work = work

    def move(self) -> None:
        self.movers.append(threading.get_ident())
        self.graded |= torch.is_grad_enabled()
        self._work()


def never() -> bool:
    return False


def beside(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """The call in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def soon() -> float:
    return time.monotonic() + WAIT


def held() -> tuple[Piece, Event, Event]:
    """A piece that is begun, and ends when it may."""
    begun, may_end = Event(), Event()
    return Piece(lambda: (begun.set(), may_end.wait(WAIT))), begun, may_end


def test_who_waits_copies_what_is_left() -> None:
    shared, (first, begun, may_end) = SharedPieces(), held()
    others = [Piece() for _ in range(5)]
    copied = beside(shared.copy, [first, *others], never)
    assert begun.wait(WAIT)
    shared.help(soon())
    assert [piece.movers for piece in others] == [[threading.get_ident()]] * 5
    assert not any(piece.graded for piece in others) and torch.is_grad_enabled()
    assert not copied.done()
    may_end.set()
    assert copied.result(WAIT)
    assert len(first.movers) == 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_copy_has_not_ended_while_a_piece_is_copied_elsewhere(stops: bool) -> None:
    """Its bytes would be digested, or the slot given to another one, before they are there."""
    shared, (first, begun, may_end), (second, helps, may_leave) = SharedPieces(), held(), held()
    copied = beside(shared.copy, [first, second, Piece()], lambda: stops and helps.is_set())
    assert begun.wait(WAIT)
    helped = beside(shared.help, soon())
    assert helps.wait(WAIT)
    may_end.set()
    with pytest.raises(TimeoutError):
        copied.result(SHORT)
    may_leave.set()
    assert copied.result(WAIT) is not stops
    assert helped.result(WAIT) is None


def test_a_stop_leaves_nothing_to_help_with() -> None:
    shared, left = SharedPieces(), [Piece(), Piece()]
    assert not shared.copy(left, lambda: True)
    shared.help(soon())
    assert [piece.movers for piece in left] == [[], []]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [MemoryError("injected"), KeyboardInterrupt()])
def test_a_piece_that_was_not_finished_fails_the_copy(error: BaseException) -> None:
    """And training only if the exception is its own: that of a signal's handler."""
    shared, (first, begun, may_end) = SharedPieces(), held()
    copied = beside(shared.copy, [first, Piece(lambda: fail(error))], never)
    assert begun.wait(WAIT)
    helped = beside(shared.help, soon())
    comes_through = isinstance(error, KeyboardInterrupt)
    assert helped.exception(WAIT) is (error if comes_through else None)
    may_end.set()
    with pytest.raises(RuntimeError, match="left unfinished by the training thread"):
        copied.result(WAIT)


def test_a_failing_copy_waits_for_who_helps() -> None:
    shared, begun, (second, helps, may_leave) = SharedPieces(), Event(), held()

    def break_off() -> None:
        begun.set()
        assert helps.wait(WAIT)
        raise MemoryError("injected")

    copied = beside(shared.copy, [Piece(break_off), second], never)
    assert begun.wait(WAIT)
    helped = beside(shared.help, soon())
    with pytest.raises(TimeoutError):
        copied.result(SHORT)
    may_leave.set()
    with pytest.raises(MemoryError, match="injected"):
        copied.result(WAIT)
    assert helped.result(WAIT) is None


def test_a_handler_of_a_signal_does_not_wait_for_the_thread_that_it_interrupts() -> None:
    """It would wait for ever: the piece that it interrupts ends when it has returned."""
    shared, (first, begun, may_end) = SharedPieces(), held()
    interrupted = Piece(lambda: shared.help(soon()))
    copied = beside(shared.copy, [first, interrupted, last := Piece()], never)
    assert begun.wait(WAIT)
    helped = beside(shared.help, soon())
    assert helped.result(WAIT) is None
    assert interrupted.movers == last.movers
    may_end.set()
    assert copied.result(WAIT)


def test_help_that_comes_too_late_breaks_nothing_off() -> None:
    class ThenHelped:
        """As a lock that somebody else takes at once."""

        def __enter__(self) -> None:
            """Nobody has it."""

        def __exit__(self, *_: object) -> None:
            shared._unfinished = True

    shared = SharedPieces()
    shared._helping = ThenHelped()  # type: ignore[assignment]
    assert shared.copy([Piece()], never)


def test_help_ends_in_time_and_may_come_again() -> None:
    shared, (first, begun, may_end) = SharedPieces(), held()
    shared.help(time.monotonic() - 1.0)  # nothing was offered, and nothing will be
    copied = beside(shared.copy, [first, left := Piece()], never)
    assert begun.wait(WAIT)
    shared.help(time.monotonic() - 1.0)
    assert left.movers == []
    shared.help(soon())
    assert left.movers == [threading.get_ident()]
    may_end.set()
    assert copied.result(WAIT)


def test_nobody_waits_for_pieces_that_never_come() -> None:
    shared = SharedPieces()
    helped = beside(shared.help, soon())
    shared.withdraw()
    assert helped.result(WAIT / 2) is None


@given(st.integers(0, 40), st.integers(1, 3))
def test_each_piece_is_copied_once(count: int, turns: int) -> None:
    shared, pieces = SharedPieces(), [Piece() for _ in range(count)]
    copied = beside(shared.copy, pieces, never)
    for _ in range(turns):
        shared.help(soon())
    assert copied.result(WAIT)
    assert [len(piece.movers) for piece in pieces] == [1] * count


class Waiting(CpuCopier):
    """Copies one piece, and continues when another thread has copied one."""

    def __init__(self) -> None:
        super().__init__(65536)
        self.helped = Event()
        self.asked = 0

    def copy(self, items: Any, mark: None, should_stop: Any, shared: SharedPieces) -> bool:
        copying = threading.get_ident()

        def stop() -> bool:
            self.asked += threading.get_ident() == copying
            return should_stop() or self.asked == 2 and not self.helped.wait(WAIT)

        return super().copy(items, mark, stop, shared)


def test_a_fence_helps_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copier, move, training = Waiting(), SerialBatch.move, threading.get_ident()

    def noted(batch: SerialBatch) -> None:
        move(batch)
        if threading.get_ident() == training:
            copier.helped.set()

    monkeypatch.setattr(SerialBatch, "move", noted)
    monkeypatch.setattr(megatron_ft.trainer.engine, "spare_threads", lambda: 2)
    smp = FakeSmp(tmp_path)
    manager = make_manager(smp, copier=copier)
    weights = torch.nn.Parameter(torch.rand(1 << 18))
    state = {"weights": weights, "strided": torch.rand(512, 512).t()}
    manager.prepare(state)
    smp.grant(1)
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    manager.save(1, state)
    with manager.fence(), torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    smp.wait_ended()
    assert copier.helped.is_set() and weights.is_leaf
    restored = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    smp.offer_last()
    again = make_manager(smp)
    again.load(into=restored)
    assert all(same_bits(restored[name], before[name]) for name in before)
    manager.close()
    again.close()


def test_a_rank_of_one_core_leaves_it_to_the_copy_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_ft.trainer.engine, "spare_threads", lambda: 1)
    monkeypatch.setattr(SharedPieces, "help", lambda *_: pytest.fail("helped"))
    smp = FakeSmp(tmp_path)
    manager, state = make_manager(smp), {"weights": torch.rand(1 << 18)}
    manager.prepare(state)
    snapshot = smp.grant(1)
    manager.save(1, state)
    with manager.fence():
        smp.wait_ended()
    assert snapshot in smp.sealed_records
    manager.close()
