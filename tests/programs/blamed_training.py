"""A small data-parallel training, one rank of which suffers a fault when a file orders it.

MEGATRON_FT_TEST_ORDERS is a folder: ``order.json`` (Order) is read in each iteration, and the rank
that an order is for writes ``struck-<number>`` with the moment at which it strikes.
MEGATRON_FT_TEST_WORK is the length of an iteration's work in seconds: time that sleeps, as that of
a host whose GPU works; below zero, so many matrices are multiplied.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from megatron_ft import SnapshotConfig, SnapshotManager, run_resilient

ORDERS, WORK = "MEGATRON_FT_TEST_ORDERS", "MEGATRON_FT_TEST_WORK"
CGROUP = "MEGATRON_FT_TEST_CGROUP"
ORDER_NAME = "order.json"
SLOWER = 0.3
COUNTED_SECONDS = 1.5
"""Training in a cgroup, after which the node has seen it there: it looks at each heartbeat."""
IN_LOADER = {"loader": 0, "loader-worker": 1, "exception-loader": 1}
"""Faults of a data loader, and its processes."""
SIZES = {"smaller-size": 7, "larger-size": 4096}
"""Elements of one all_reduce, in which the others have 2048."""


@dataclass(frozen=True)
class Order:
    """Rank ``rank`` suffers ``kind`` in iteration ``at``, or in its next one if that is later.

    Signals come ``delay`` seconds after its begin.
    """

    number: int
    kind: str
    rank: int
    at: int
    delay: float

    def write(self, folder: Path) -> None:
        new = folder / f"{ORDER_NAME}.new"
        new.write_text(json.dumps(asdict(self)))
        new.rename(folder / ORDER_NAME)


def read_order(folder: Path) -> Order | None:
    path = folder / ORDER_NAME
    return Order(**json.loads(path.read_text())) if path.exists() else None


def sleep_in_c() -> None:
    """A call that never returns, with the interpreter's lock held."""
    reading, _writing = os.pipe()
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)


def compute_in_c() -> None:
    """Years of computing, with the interpreter's lock held."""
    re.match("(a+)+$", 60 * "a" + "b")


def fail() -> None:
    raise ValueError("this rank alone cannot continue")


def call_another() -> None:
    dist.all_reduce(torch.zeros(1))


def exhaust_memory() -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)))


def enter_cgroup() -> None:
    """A memory cgroup of its own, so that nobody else is hit."""
    Path(os.environ[CGROUP], "cgroup.procs").write_text(str(os.getpid()))


def sleep_in_thread() -> None:
    """As ``sleep_in_c``, while the main thread is wherever it is."""
    threading.Timer(0.02, sleep_in_c).start()


def signals(number: int, delay: float) -> None:
    threading.Timer(delay, os.kill, (os.getpid(), number)).start()


AT_ONCE: dict[str, Callable[[], None]] = {
    "exception": fail,
    "locked": compute_in_c,
    "locked-asleep": sleep_in_c,
    "locked-thread": sleep_in_thread,
    "other-collective": call_another,
    "memory": exhaust_memory,
}
LATER = {"killed": signal.SIGKILL, "suspended": signal.SIGSTOP}


class Samples(Dataset[torch.Tensor]):
    """Samples; the first one that is read with a ``fault`` never comes, or fails."""

    fault = ""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fault == "exception-loader":
            fail()
        if self.fault:
            reading, _writing = os.pipe()
            os.read(reading, 1)
        return torch.ones(16, 32) * (index % 7)


class Training:
    def __init__(self) -> None:
        self.folder, self.rank = Path(os.environ[ORDERS]), dist.get_rank()
        self.work, self.order = float(os.environ[WORK]), ""
        self.entered = 0.0
        self.samples = Samples()
        self.batches: Iterator[torch.Tensor] = iter(DataLoader(self.samples))
        torch.manual_seed(1234)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def next_batch(self) -> torch.Tensor:
        return next(self.batches)

    def compute(self) -> None:
        """The work of an iteration that needs no other rank."""
        if self.work >= 0:
            time.sleep(self.work)
        matrix = torch.ones(256, 256)
        for _ in range(int(-self.work)):
            matrix @ matrix

    def iterate(self, iteration: int) -> None:
        order, slower = read_order(self.folder), 0.0
        if order is not None and order.rank == self.rank and iteration >= order.at:
            slower = self.suffer(order)
        data = self.next_batch()
        dist.barrier()
        began = time.monotonic()
        self.compute()
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()
        time.sleep(slower * (time.monotonic() - began))
        if self.order == "exception-late":
            fail()
        dist.all_reduce(torch.zeros(SIZES.get(self.order, 2048)))
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def suffer(self, order: Order) -> float:
        """Suffer what is ordered, once; the share by which this iteration's work is longer."""
        struck, kind = self.folder / f"struck-{order.number}", order.kind
        first = not struck.exists()
        if first and kind == "memory" and not self.entered:
            enter_cgroup()
            self.entered = time.monotonic()
        if first and kind == "memory" and time.monotonic() < self.entered + COUNTED_SECONDS:
            return 0.0
        if first:
            struck.write_text(str(time.monotonic() + (order.delay if kind in LATER else 0.0)))
            self.order = kind
        if first and kind in AT_ONCE:
            AT_ONCE[kind]()
        if first and kind in LATER:
            signals(LATER[kind], order.delay)
        if first and kind in IN_LOADER:
            self.samples.fault = kind
            self.batches = iter(DataLoader(self.samples, num_workers=IN_LOADER[kind]))
        return SLOWER if kind == "slow" else 0.0


def main() -> None:
    """Train until told to end."""
    dist.init_process_group("gloo")
    snapshots = SnapshotManager(SnapshotConfig.from_env())
    training = Training()
    state = {"model": training.model, "optimizer": training.optimizer}
    first = snapshots.load(into=state)
    snapshots.register_fence(training.optimizer)
    for iteration in range(first + 1, int(sys.argv[1]) + 1):
        training.iterate(iteration)
        snapshots.save(iteration, state)
    snapshots.close(finished=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_resilient(main)
