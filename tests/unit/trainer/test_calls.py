"""Calls of torch.distributed in the page of heartbeats, read as an SMP does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce, irecv  # before anything is wrapped, as Megatron does

from megatron_ft.rpc.heartbeat_page import CALLS, Call, PulseFile, read_calls
from megatron_ft.trainer.calls import RECORDER


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pulse-1"
    file = PulseFile(path)
    file.iteration = 7
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[no-untyped-call]
    RECORDER.record_to(file)
    yield path
    RECORDER.record_to(None)
    dist.destroy_process_group()


def short(call: Call) -> tuple[Any, ...]:
    return call.name, call.sequence, call.size, call.group, bool(call.left)


def test_calls_are_recorded_by_group(page: Path) -> None:
    group, tensor = dist.new_group([0]), torch.ones(10)
    before = time.monotonic()
    all_reduce(tensor)
    dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    found = read_calls(page, 100)
    name = group.group_name  # type: ignore[union-attr]
    assert [short(call) for call in found if call.name != "monitored_barrier"] == [
        ("all_reduce", 1, 40, "default", True),
        ("all_reduce", 1, 40, name, True),
        ("all_reduce", 2, 40, name, True),
        ("barrier", 2, -1, "default", True),
    ]
    assert all(before <= call.entered <= call.left for call in found)
    assert {call.iteration for call in found} == {7}


def test_a_batch_between_two_is_made_and_recorded(page: Path) -> None:
    """Megatron's pipeline makes such; torch takes nothing but its own two functions."""
    for one in (dist.isend, dist.irecv, irecv):
        dist.P2POp(one, torch.ones(1), 0)
    with pytest.raises((IndexError, ValueError)):
        dist.batch_isend_irecv([])
    assert [call.name for call in read_calls(page, 1)] == ["batch_isend_irecv"]


def test_a_call_that_fails_has_been_left_and_one_that_cannot_be_recorded_is_made(
    page: Path,
) -> None:
    with pytest.raises(Exception, match="tensor|Tensor"):
        all_reduce("no tensor")  # type: ignore[arg-type]
    (one,) = read_calls(page, 1)
    assert one.left and one.name == "all_reduce"

    def sized(value: object) -> str:
        return "called"

    class Symbolic:
        nbytes = "a symbol"

    assert RECORDER.recording("all_reduce", sized)(Symbolic()) == "called"


def test_only_the_newest_stay_and_sequences_begin_anew(page: Path) -> None:
    empty = RECORDER.recording("barrier", lambda: None)
    for _ in range(CALLS + 5):
        empty()
    found = read_calls(page, 1000)
    assert [call.sequence for call in found] == list(range(6, CALLS + 6))
    file = PulseFile(page)
    RECORDER.record_to(file)
    empty()
    assert [call.sequence for call in read_calls(page, 1000)] == [1]
    RECORDER.record_to(None)
    empty()
    assert len(read_calls(page, 1000)) == 1


def test_time_in_collectives_is_added_up_once(tmp_path: Path) -> None:
    file = PulseFile(tmp_path / "pulse-1")
    RECORDER.record_to(file)
    inner = RECORDER.recording("all_gather", lambda: time.sleep(0.05))
    outer = RECORDER.recording("all_gather_object", lambda: (inner(), inner()))
    before = time.monotonic()
    outer()
    inner()
    took = time.monotonic() - before
    RECORDER.record_to(None)
    assert 0.149 <= file.waited <= took, "inner calls are a part of the outer one"


def test_the_page_outlives_a_kill(page: Path) -> None:
    child = os.fork()
    if not child:
        RECORDER.recording("broadcast", lambda: os.kill(os.getpid(), signal.SIGKILL))()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (last,) = read_calls(page, 1)
    assert short(last) == ("broadcast", 1, -1, "default", False)
