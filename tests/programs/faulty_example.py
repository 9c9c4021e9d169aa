"""examples/plain_pytorch.py with faults that variables ask for, each where its variable is set.

MEGATRON_FT_TEST_GATE names a file: the last iteration begins once it is there, so that faults that
are to strike a job find it training, however late they come.

MEGATRON_FT_TEST_HANGS is a list ``incarnation:kind:iteration:rank`` of ranks that stop making
progress, in ways of their own; incarnation ``*`` stands for all.

MEGATRON_FT_TEST_POISON names a folder.  Its file ``poison`` holds an iteration: there, in the job's
first incarnation, a weight becomes wrong on all ranks.  While ``fail`` exists, training with that
weight raises.

MEGATRON_FT_TEST_FLIPS names a folder.  Of each file in it, ``<rank>-<iteration>-<what>``, a bit of
the first weight, moment or buffer flips on that rank when the iteration has ended, once.

MEGATRON_FT_TEST_DECLINES: ranks take no snapshot and start from nothing; it is the reason.
"""

from __future__ import annotations

import ctypes
import importlib.util
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

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"
GATE, HANGS = "MEGATRON_FT_TEST_GATE", "MEGATRON_FT_TEST_HANGS"
POISON, FLIPS = "MEGATRON_FT_TEST_POISON", "MEGATRON_FT_TEST_FLIPS"
DECLINES = "MEGATRON_FT_TEST_DECLINES"
WAIT_SECONDS = 250.0
WRONG = 1000.0
WEIGHT, MOMENT, BUFFER = "weight", "moment", "buffer"
BIT = 4
"""Low in a mantissa: losses hardly show it."""

Step = Callable[[dict[str, Any], int, Any], float]
"""The example's training step: state, iteration and device to the loss."""


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
    samples: Any = [0]
    next(iter(DataLoader(samples, collate_fn=lambda _: time.sleep(3600), num_workers=1)))


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


def gated(train_one: Step, gate: str, last: int) -> Step:
    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        deadline = time.monotonic() + WAIT_SECONDS
        while iteration == last and not os.path.exists(gate):
            assert time.monotonic() < deadline, "the test's faults have not struck"
            time.sleep(0.02)
        return float(train_one(state, iteration, device))

    return step


def hanging(train_one: Step, words: str) -> Step:
    faults = [fault.split(":") for fault in words.split()]
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


def poisoned(train_one: Step, folder: Path) -> Step:
    first_incarnation = os.environ["MEGATRON_FT_INCARNATION"] == "1"

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        loss = float(train_one(state, iteration, device))
        weight = next(state["model"].parameters()).data.view(-1)
        poison = folder / "poison"
        if first_incarnation and poison.exists() and poison.read_text() == str(iteration):
            weight[0] = WRONG
        if weight[0] > WRONG / 2 and (folder / "fail").exists():
            sys.exit("the loss has diverged")
        return loss

    return step


def corrupted(train_one: Step, folder: Path) -> Step:
    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        loss = float(train_one(state, iteration, device))
        for flip in folder.glob(f"{os.environ['RANK']}-{iteration}-*"):
            flip.unlink()
            target(state, flip.name.split("-")[2]).view(-1).view(torch.uint8)[0] ^= 1 << BIT
        return loss

    return step


def target(state: dict[str, Any], what: str) -> torch.Tensor:
    weight: torch.Tensor = next(state["model"].parameters())
    if what == MOMENT:
        weight = state["optimizer"].state[weight]["exp_avg"]
    return next(state["model"].buffers()) if what == BUFFER else weight.detach()


def declining(manager: Any, reason: str) -> Any:
    class Manager(manager):  # type: ignore[misc]
        def load(self, into: Any) -> int:
            self.decline(reason)
            return int(super().load(into))

    return Manager


def main() -> None:
    """Train as the example does; again in this process, where another rank has failed."""
    spec = importlib.util.spec_from_file_location("plain_pytorch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if gate := os.environ.get(GATE):
        example.train_one = gated(example.train_one, gate, example.arguments().iterations)
    if words := os.environ.get(HANGS):
        example.train_one = hanging(example.train_one, words)
    if folder := os.environ.get(POISON):
        example.train_one = poisoned(example.train_one, Path(folder))
    if folder := os.environ.get(FLIPS):
        example.train_one = corrupted(example.train_one, Path(folder))
    if reason := os.environ.get(DECLINES):
        example.SnapshotManager = declining(example.SnapshotManager, reason)
    example.main()


if __name__ == "__main__":
    if {GATE, HANGS} & os.environ.keys():
        run_resilient(main)
    else:
        main()
