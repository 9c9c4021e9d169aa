"""Records each call of a collective of torch.distributed in the page of heartbeats.

The page outlives any end of the process.  Functions are wrapped from inside, so that a module that
has imported one by name before calls the wrapped one too.  What C++ calls itself (the gradients of
DistributedDataParallel) is not seen.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ft.core.frameworks import wrap
from megatron_ft.rpc.heartbeat_page import (
    CALL,
    CALL_LEFT,
    CALL_LEFT_AT,
    CALLS,
    FILE_BYTES,
    PulseFile,
)

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    "monitored_barrier",
)
BETWEEN_TWO = ("send", "recv", "batch_isend_irecv")
"""Ranks of a group call these in different numbers, so they have no sequence.

isend and irecv are not wrapped: P2POp compares them with torch's own functions.
"""

Function = Callable[..., Any]
_GROUP: Any = getattr(dist, "ProcessGroup", None)


class CallRecorder:
    """Counts calls by group and stores them in a page; without a page nothing is recorded."""

    def __init__(self) -> None:
        self._file: PulseFile | None = None
        self._groups: dict[Any, list[Any]] = {}
        self._number = 0

    def record_to(self, file: PulseFile | None) -> None:
        """Record in ``file`` from now on; sequences begin anew, as they do in new processes."""
        if file is not None and dist.is_available():
            for name in (*COLLECTIVES, *BETWEEN_TWO):
                _wrap(name, functools.partial(self.recording, name))
        self._groups.clear()
        self._file, self._number = file, 0

    def recording(self, name: str, function: Function) -> Function:
        """The function with a record of each call: one flat closure, as it costs each call."""
        step, label, groups = int(name in COLLECTIVES), name.encode(), self._groups
        pack, leave, now, kind = CALL.pack_into, CALL_LEFT.pack_into, time.monotonic, _GROUP
        first, records, length, left_at = FILE_BYTES, CALLS, CALL.size, CALL_LEFT_AT

        def call(*arguments: Any, **named: Any) -> Any:
            if (file := self._file) is None:
                return function(*arguments, **named)
            place, waited = 0, file.waited
            try:
                group = named.get("group") if named else None
                for one in arguments:
                    if type(one) is kind:
                        group = one
                known = groups.get(group) or self._known(group)
                known[1] = count = known[1] + step
                self._number = number = self._number + 1
                at = first + number % records * length
                size = getattr(arguments[0], "nbytes", -1) if arguments else -1
                before, memory, entered = file.iteration, file.memory, now()
                pack(memory, at, number, count * step, size, before, entered, 0.0, label, known[0])
                place = at + left_at
            except Exception:
                # Tensors without memory, groups of other kinds: a record that fails costs no call.
                place = 0
            try:
                return function(*arguments, **named)
            finally:
                if place and not file.memory.closed:
                    left = now()
                    leave(file.memory, place, left)
                    # In place of what collectives have added that this one is made of.
                    file.waited = waited + left - entered

        return call

    def _known(self, group: Any) -> list[Any]:
        text = "default" if group is None else group.group_name
        self._groups[group] = found = [text.encode(), 0]
        return found


RECORDER = CallRecorder()
"""The recorder of this process."""


def _wrap(name: str, make: Callable[[Function], Function]) -> None:
    """Wrap what is behind the logging wrapper of a function; else the function itself."""
    outer = getattr(distributed_c10d, name, None)
    inner = getattr(outer, "__wrapped__", None)
    for cell in getattr(outer, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = make(inner)
            return
    if outer is not None and inner is None:
        for module in (distributed_c10d, dist):
            wrap(module, name, make)
