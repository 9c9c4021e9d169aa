"""A training function entered many times in one process, and what that leaves behind."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_ft.core.process_tools import free_port
from megatron_ft.trainer import rendezvous
from megatron_ft.trainer.interrupt import Interrupter, RestartRequested
from megatron_ft.trainer.teardown import ProcessState, tear_down

ENTRIES = "TEST_ENTRIES"
"""How often a program enters its training function."""

INTERRUPTED = "TEST_INTERRUPTED"

WATCHED = "TEST_WATCHED_PACKAGE"
"""A package whose variables are compared with those before the first entry, in the output."""


class MallocInfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``, over all its arenas, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )

    @classmethod
    def now(cls) -> Any:
        function = ctypes.CDLL(None).mallinfo2
        function.restype = cls
        return function()


class Usage(NamedTuple):
    descriptors: int
    threads: int
    kilobytes: int
    allocated: int
    """Kilobytes that malloc has handed out: exact, while pages follow how it fills its arenas."""
    objects: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
        kilobytes = pages * resource.getpagesize() // 1024
        heap = MallocInfo.now()
        allocated = (heap.uordblks + heap.hblkhd) // 1024
        return cls(counts[0], counts[1], kilobytes, allocated, len(gc.get_objects()))


class Meeting:
    """Gives all ranks one new port for each entry, as a supervisor does for each incarnation."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self._count = rank, ranks, 0
        port = int(os.environ["MASTER_PORT"])
        self._store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)

    def next_port(self) -> None:
        self._count += 1
        if self._rank == 0:
            self._store.set(f"port-{self._count}", str(free_port()))
        os.environ["MASTER_PORT"] = self._store.get(f"port-{self._count}").decode()
        self._store.add(f"here-{self._count}", 1)
        while int(self._store.add(f"here-{self._count}", 0)) < self._ranks:
            time.sleep(0.001)


class Reentries:
    """Calls a training function so many times, and tears down after each.

    Every second call is interrupted somewhere if the environment asks for it.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._seconds = 1.0
        """How long the last whole call took."""
        self._chance = random.Random(int(os.environ["RANK"]))

    def run(self, enter: Callable[[], Any]) -> Any:
        meeting = Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        rendezvous.install()
        settings, interrupter, result = ProcessState(), Interrupter(), None
        package = os.environ.get(WATCHED, "")
        before = global_values(package)
        for number in range(self._entries):
            meeting.next_port()
            started = time.monotonic()
            if INTERRUPTED in os.environ and number % 2:
                self._interrupt(interrupter, enter)
            else:
                with interrupter:
                    result = enter()
                self._seconds = time.monotonic() - started
            ended = time.monotonic()
            tear_down(settings)
            torn_down = time.monotonic()
            _await_groups()
            times = f"{ended - started:.3f} s, torn down in {torn_down - ended:.3f} s"
            print(f"entry {number}: {times}, {Usage.now()}", flush=True)
            for name, value in global_values(package).items() if package else ():
                if value != before.get(name):
                    print(f"CHANGED {name}: {before.get(name)} -> {value}", flush=True)
        return result

    def _interrupt(self, interrupter: Interrupter, enter: Callable[[], Any]) -> None:
        timer = threading.Timer(self._chance.random() * self._seconds, interrupter.interrupt)
        timer.start()
        try:
            with interrupter:
                with suppress(RuntimeError):  # the other rank left first
                    enter()
                time.sleep(60)
        except RestartRequested as error:
            print("interrupted in", *_place(error), flush=True)
        else:
            raise AssertionError("not interrupted in 60 s")
        timer.join()


def _place(error: BaseException) -> list[str]:
    frames = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    return frames[-3:]


def _await_groups() -> None:
    for thread in threading.enumerate():
        if thread.name == "megatron-ft-groups":
            thread.join(20)
            assert not thread.is_alive(), "the process groups did not go in 20 s"


def global_values(package: str) -> dict[str, str]:
    """What the variables of a package's modules and classes hold, to compare."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                for inner, held in list(vars(value).items()):
                    if not inner.startswith("__") and not isinstance(held, _CODE):
                        found[f"{name}.{key}.{inner}"] = _text(held)
            elif not isinstance(value, (*_CODE, type, ModuleType)) and not key.startswith("__"):
                found[f"{name}.{key}"] = _text(value)
    return found


_CODE = (FunctionType, classmethod, staticmethod, property)


def _text(value: Any) -> str:
    try:
        return repr(value)[:300]
    except Exception as error:
        return f"no text: {type(error)}"
