"""Removes what a training function leaves in its process, so that it can be entered again.

Call ``tear_down`` in the main thread, after the ``except`` clause that caught the interruption: an
exception that somebody holds keeps all frames of the training, and so its model, alive.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from megatron_ft.core.errors import ProcessChangedError
from megatron_ft.trainer.process_settings import NOTHING, ProcessSetting, read, settings
from megatron_ft.trainer.state import RngState

LEAVE_SECONDS = 2.0
"""Time for a process that the training function started, to end when asked to."""

_callbacks: list[Callable[[], None]] = []
_preparations: list[Callable[[], None]] = []


def on_entry(prepare: Callable[[], None]) -> Callable[[], None]:
    """Have ``prepare`` called each time that a ProcessState is taken, before the first entry.

    It raises UnsupportedVersionError where training cannot be entered again.  Returns the function
    that takes it off again.
    """
    return _registered(_preparations, prepare)


def on_teardown(callback: Callable[[], None]) -> Callable[[], None]:
    """Have ``callback`` called by each ``tear_down``; the function that takes it off again.

    The last one that was added is called first, and each once.  It must work wherever training
    ended, also before it began.
    """
    return _registered(_callbacks, callback)


def _registered(functions: list[Callable[[], None]], one: Callable[[], None]) -> Callable[[], None]:
    if one not in functions:
        functions.append(one)

    def remove() -> None:
        if one in functions:
            functions.remove(one)

    return remove


MOST_NAMES = 5
"""Settings that an error names; more of them have one cause."""


class ProcessState:
    """The present settings and random states, with which a new process begins.

    A script that seeds nothing must begin with the same numbers as in a new process.
    Raises UnsupportedVersionError if a framework cannot be left and entered again.
    """

    def __init__(self) -> None:
        for prepare in _preparations:
            prepare()
        self._values = {one.name: read(one) for one in settings()}
        self._random = RngState().state_dict()

    def restore(self) -> None:
        """Make it hold again; ProcessChangedError names what cannot be put back."""
        RngState().load_state_dict(self._random)
        # Twice: some settings of torch change others.
        for _ in range(2):
            for setting, value in self._changed():
                if setting.put is not None:
                    with suppress(Exception):
                        setting.put(value)
        left = [setting.name for setting, _ in self._changed()]
        if left:
            more = f" and {len(left) - MOST_NAMES} others" if len(left) > MOST_NAMES else ""
            named = ", ".join(left[:MOST_NAMES])
            raise ProcessChangedError(f"training has changed {named}{more}, which cannot be undone")

    def _changed(self) -> list[tuple[ProcessSetting, Any]]:
        """Settings that are not as they were, with the values that they had."""
        noted = ((one, self._values.get(one.name, one.new)) for one in settings())
        return [(one, v) for one, v in noted if v is not NOTHING and read(one) != v]


def tear_down(state: ProcessState) -> None:
    """Close and reset everything that a training function made.

    ``state`` is that from before its first call.  Raises whatever fails: the process is then
    in no state to train, and has to end.
    """
    for callback in reversed(_callbacks):
        callback()
    groups = _leave_groups()
    _end_loaders()
    # Cycles hold models and optimizers.
    gc.collect()
    # Each takes 10 ms to go, and one that waits for a peer takes until its timeout.
    Thread(target=groups.clear, name="megatron-ft-groups", daemon=True).start()
    _end_workers()
    state.restore()
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.empty_cache()


def _leave_groups() -> list[Any]:
    """Leave all process groups, also those that an interruption left half made.

    New groups are named by a count, which has to begin anew: other ranks are new processes.
    Returns those of gloo, which are still there.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not torch.distributed.is_available():
        return []
    gloo = [group for group, (backend, _) in c10d._world.pg_map.items() if backend == "gloo"]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    world = c10d._world
    for name in _C10D_MAPS:
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    randomness: Any = sys.modules.get("torch.distributed.tensor._random")
    if randomness is not None:
        randomness._rng_tracker = None
    return gloo


_C10D_MAPS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
)


def _end_loaders() -> None:
    """End the processes of torch's data loaders that nobody has closed.

    The collection of garbage closes the queues of a loader in a cycle first.  Its processes
    would then notice it up to 5 s later.
    """
    dataloader: Any = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    for iterator in [found for found in gc.get_objects() if type(found) is kind]:
        iterator._shutdown_workers()


def _end_workers() -> None:
    """End processes of multiprocessing that outlive the objects that stood for them."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(LEAVE_SECONDS)
        if worker.exitcode is None:
            worker.kill()
            worker.join()
