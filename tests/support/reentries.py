"""A training function entered many times in one process, and what that leaves behind."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from megatron_ft.core.process_tools import free_port
from megatron_ft.trainer import rendezvous
from megatron_ft.trainer.interrupt import Interrupter, RestartRequested
from megatron_ft.trainer.teardown import ProcessState, tear_down

WATCHED = "TEST_WATCHED_PACKAGE"
"""A package whose variables are compared with those before the first entry, in the output."""


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    kilobytes: int
    objects: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
        kilobytes = pages * resource.getpagesize() // 1024
        return cls(counts[0], counts[1], kilobytes, len(gc.get_objects()))


class Meeting:
    """Gives all ranks one new port for each entry, as a supervisor does for each incarnation."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self._count = rank, ranks, 0
        port = int(os.environ["MASTER_PORT"])
        self._store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)

    def next_port(self) -> None:
        """Await all ranks, and set MASTER_PORT."""
        self._count += 1
        if self._rank == 0:
            self._store.set(f"port-{self._count}", str(free_port()))
        os.environ["MASTER_PORT"] = self._store.get(f"port-{self._count}").decode()
        self._store.add(f"here-{self._count}", 1)
        while int(self._store.add(f"here-{self._count}", 0)) < self._ranks:
            time.sleep(0.001)


class Reentries:
    """Calls a training function so many times, and tears down after each."""

    def __init__(self, entries: int, after: Callable[[int], None] = lambda _number: None) -> None:
        """``after`` is called with the number of each entry that has ended."""
        self._entries, self._after = entries, after
        self.usages: list[Usage] = []

    def run(self, enter: Callable[[], Any]) -> Any:
        """What the last call returned."""
        meeting = Meeting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        rendezvous.install()
        settings, interrupter, result = ProcessState(), Interrupter(), None
        package = os.environ.get(WATCHED, "")
        before = global_values(package)
        for number in range(self._entries):
            meeting.next_port()
            started = time.monotonic()
            try:
                with interrupter:
                    result = enter()
            except RestartRequested:
                pass
            ended = time.monotonic()
            tear_down(settings)
            self.usages.append(Usage.now())
            times = f"{ended - started:.3f} s, torn down in {time.monotonic() - ended:.3f} s"
            print(f"entry {number}: {times}, {self.usages[-1]}", flush=True)
            self._after(number)
            for name, value in global_values(package).items() if package else ():
                if value != before.get(name):
                    print(f"CHANGED {name}: {before.get(name)} -> {value}", flush=True)
        return result


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
