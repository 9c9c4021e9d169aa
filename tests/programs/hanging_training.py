"""examples/plain_pytorch.py with one rank that stops making progress, in ways of its own.

MEGATRON_FT_TEST_HANGS is a list ``incarnation:kind:iteration:rank``; incarnation ``*`` stands for
all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import BaseTorchFunctionMode
from torch.utils.data import DataLoader

from megatron_ft import run_resilient
from tests.programs.poisoned_training import load


def loop_for_ever() -> None:
    while True:
        pass


def block_in_c() -> None:
    """A call that never returns, with the interpreter's lock held."""
    reading, _writing = os.pipe()
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)


def enter_alone() -> None:
    dist.barrier()


def skip_one() -> None:
    """The others call a collective that this rank does not."""
    time.sleep(3600)


def call_another() -> None:
    dist.all_reduce(torch.zeros(1))


def load_batch() -> None:
    """A process of the data loader never ends its sample."""
    next(iter(DataLoader([0], collate_fn=lambda _: time.sleep(3600), num_workers=1)))


def be_suspended() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:  # not another function: who asks for its stack wakes it
        pass


def fail() -> None:
    raise ValueError("this rank alone cannot continue")


def leave() -> None:
    sys.exit(3)


def leave_quietly() -> None:
    sys.exit(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust_memory() -> None:
    """In a memory cgroup of its own, whose folder a variable names, so that nobody else is hit."""
    folder = Path(os.environ["MEGATRON_FT_TEST_CGROUP"])
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(1.5)  # the node looks at each heartbeat
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)))


def enter_mode() -> None:
    """A mode of torch that is entered and never left: nothing puts that back."""
    BaseTorchFunctionMode().__enter__()


KINDS: dict[str, Callable[[], None]] = {
    "loop": loop_for_ever,
    "c": block_in_c,
    "collective": enter_alone,
    "suspended": be_suspended,
    "skips": skip_one,
    "another": call_another,
    "loads": load_batch,
    "error": fail,
    "leave": leave,
    "leave_quietly": leave_quietly,
    "killed": be_killed,
    "memory": exhaust_memory,
    "mode": enter_mode,
}


def hanging(train_one: Any, faults: list[list[str]]) -> Any:
    apart = {int(at) for _, kind, at, _ in faults if kind in ("skips", "another")}
    here = (os.environ["MEGATRON_FT_INCARNATION"], "*", os.environ["RANK"])
    mine = {
        int(at): KINDS[kind]
        for incarnation, kind, at, rank in faults
        if incarnation in here[:2] and rank == here[2]
    }

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        if iteration in mine:
            mine[iteration]()
        elif iteration in apart:
            dist.barrier()
        return float(train_one(state, iteration, device))

    return step


def main() -> None:
    training = load()
    faults = [fault.split(":") for fault in os.environ["MEGATRON_FT_TEST_HANGS"].split()]
    training.train_one = hanging(training.train_one, faults)
    training.main()


if __name__ == "__main__":
    run_resilient(main)
