"""Two ranks whose training functions stand still in many ways, and are interrupted there.

Run by tests/unit/trainer/test_resilient.py: ``main`` with the number of rounds and some ways.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from megatron_ft.core.process_tools import free_port
from megatron_ft.trainer import rendezvous as rendezvous_in_python
from megatron_ft.trainer.interrupt import Interrupter, RestartRequested
from megatron_ft.trainer.teardown import ProcessState, tear_down

RANK_0_ALONE = 600.0
"""What the other rank does meanwhile: it sleeps."""

here = threading.Event()
"""Set just before a rank stands still."""


def preload() -> None:
    """Nothing more than what this module imports."""


def still() -> None:
    here.set()
    time.sleep(RANK_0_ALONE)


def in_python() -> None:
    here.set()
    while True:
        pass


def in_system_call() -> None:
    here.set()
    read, _write = os.pipe()
    os.read(read, 1)


def in_lock() -> None:
    lock = threading.Lock()
    here.set()
    with lock, lock:
        pass


def in_swallowing_code() -> None:
    here.set()
    for _ in range(2):
        try:
            still()
        finally:
            continue  # noqa: B012  # swallows whatever was raised
    still()


def in_caught_errors() -> None:
    while True:
        try:
            join()
            alone(dist.barrier)
        except Exception:
            pass
        finally:
            time.sleep(0)


class Slow(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        time.sleep(600)


def in_loader() -> None:
    for _ in DataLoader(Slow(), num_workers=1):
        here.set()


def join(ranks: int = 2) -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=ranks)


def alone(wait: Callable[[], Any]) -> None:
    """``wait`` on rank 0, for a rank that does not come."""
    if dist.get_rank():
        still()
    here.set()
    wait()


def collective(wait: Callable[[], Any]) -> Callable[[], None]:
    def train() -> None:
        join()
        dist.barrier()
        alone(wait)

    train.__name__ = getattr(wait, "__name__", "collective")
    return train


def all_reduce() -> None:
    dist.all_reduce(torch.ones(100_000))


def barrier() -> None:
    dist.barrier()


def broadcast() -> None:
    dist.broadcast(torch.ones(100_000), src=1)


def monitored_barrier() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=600))


def isend_irecv() -> None:
    tensors = [torch.ones(9_000_000), torch.ones(10)]
    sends = [dist.P2POp(dist.isend, tensors[0], 1), dist.P2POp(dist.irecv, tensors[1], 1)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


def many_outstanding() -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    for work in works:
        work.wait()


def gather_objects() -> None:
    dist.all_gather_object([None, None], "x")


def new_group() -> None:
    dist.new_group()


def store_get() -> None:
    dist.distributed_c10d._get_default_store().get("never")


def store_wait() -> None:
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=600))


def backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    replicas = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    replicas(torch.ones(1, 10)).sum().backward()


def exchanging() -> None:
    """Both ranks exchange for a while, and rank 1 stops at some point of it.

    Not interrupted while bytes travel: gloo loses the error of what it is just writing.
    """
    join()
    group = dist.new_group()
    for number in range(40):
        if number == 30:
            if dist.get_rank():
                still()
            here.set()
        dist.all_reduce(torch.ones(100), group=group)
        dist.all_reduce(torch.ones(5000), async_op=True)
        dist.barrier()


def rendezvous() -> None:
    here.set()
    join(ranks=3)


def connecting() -> None:
    here.set()
    os.environ["MASTER_PORT"] = str(free_port())  # nobody is there
    dist.init_process_group("gloo", rank=1, world_size=2)


ALONE = (in_python, in_system_call, in_lock, in_swallowing_code, in_loader, connecting)
TOGETHER = (
    *map(collective, (all_reduce, barrier, broadcast, monitored_barrier, isend_irecv)),
    *map(collective, (many_outstanding, gather_objects, new_group, store_get, store_wait)),
    collective(backward),
    *(exchanging, rendezvous, in_caught_errors),
)


def main() -> None:
    """Each way in turn, as often as the first argument says; further arguments choose ways."""
    rank, rounds = int(os.environ["RANK"]), int(sys.argv[1])
    meeting = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0
    )
    rendezvous_in_python.install()
    settings, interrupter = ProcessState(), Interrupter()
    chance = random.Random(rank)
    only = sys.argv[2:]
    ways = [train for train in (*ALONE, *TOGETHER) if not only or train.__name__ in only]
    for number, train in enumerate(ways * rounds):
        if rank == 0:
            meeting.set(f"port-{number}", str(free_port()))
        # Also shows that connections from before the training function stay open.
        os.environ["MASTER_PORT"] = meeting.get(f"port-{number}").decode()
        seconds = interrupted(interrupter, train, chance.random() * 0.02)
        tear_down(settings)
        print(f"{train.__name__} {seconds:.3f} {usage()}", flush=True)
        await_both(meeting, f"done-{number}")
    meeting.add("left", 1)
    while rank == 0 and int(meeting.add("left", 0)) < 2:  # it serves the store
        time.sleep(0.001)


def await_both(meeting: Any, name: str) -> None:
    """Return when both ranks have come here."""
    meeting.add(name, 1)
    while int(meeting.add(name, 0)) < 2:
        time.sleep(0.001)


def interrupted(interrupter: Interrupter, train: Callable[[], None], delay: float) -> float:
    """Seconds from the request to the end of ``train``."""
    here.clear()
    asked: list[float] = []

    def ask() -> None:
        assert here.wait(60), f"{train.__name__} did not begin in 60 s"
        time.sleep(delay)
        asked.append(time.monotonic())
        interrupter.interrupt()

    other = threading.Thread(target=ask)
    other.start()
    try:
        with interrupter:
            with suppress(RuntimeError):  # the other rank left first
                train()
            still()
        raise AssertionError(f"{train.__name__} was not interrupted")
    except RestartRequested:
        left = time.monotonic()
    other.join()
    return left - asked[0]


def usage() -> str:
    """Descriptors, threads, and KiB of memory in use."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    kilobytes = pages * resource.getpagesize() // 1024
    counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return " ".join(map(str, (*counts, kilobytes)))
