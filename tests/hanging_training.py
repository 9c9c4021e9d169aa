"""examples/plain_pytorch.py with one rank that stops making progress, in ways of its own.

MEGATRON_FT_TEST_HANGS is a list ``life:kind:iteration:rank``; life ``*`` stands for all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.poisoned_training import load

SLOWER = 0.03
"""Seconds more in each iteration of a rank that is slow."""


def loop_for_ever() -> None:
    while True:
        pass


def block_in_c() -> None:
    """A call that never returns, with the interpreter's lock held."""
    reading, _writing = os.pipe()
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)


def enter_alone() -> None:
    dist.barrier()


def be_suspended() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    loop_for_ever()


def work_slowly() -> None:
    end = time.monotonic() + SLOWER
    while time.monotonic() < end:
        pass


KINDS: dict[str, Callable[[], None]] = {
    "loop": loop_for_ever,
    "c": block_in_c,
    "collective": enter_alone,
    "suspended": be_suspended,
    "slow": work_slowly,
}


def hanging(train_one: Any, faults: list[list[str]]) -> Any:
    """The example's training step with the faults."""
    here = (os.environ["MEGATRON_FT_INCARNATION"], "*")
    mine = {
        int(at): KINDS[kind]
        for life, kind, at, rank in faults
        if life in here and rank == os.environ["RANK"] and kind != "slow"
    }
    slow = any(kind == "slow" and rank == os.environ["RANK"] for _, kind, _, rank in faults)

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        if iteration in mine:
            mine[iteration]()
        if slow:
            work_slowly()
        return float(train_one(state, iteration, device))

    return step


def main() -> None:
    """Train as the example does."""
    training = load()
    faults = [fault.split(":") for fault in os.environ["MEGATRON_FT_TEST_HANGS"].split()]
    training.train_one = hanging(training.train_one, faults)
    training.main()


if __name__ == "__main__":
    main()
