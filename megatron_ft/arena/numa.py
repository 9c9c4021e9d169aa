"""Arenas on the NUMA node of the rank that writes them.

The SMP makes arenas, so their pages would lie where it happens to run.  Where a machine has
several nodes and a rank keeps to the CPUs of one, its arena's pages are asked for there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.core.background import parse_cpus

log = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")

_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MOST_NODES = 1024


def home_node(allowed: Collection[int], nodes: Mapping[int, Collection[int]]) -> int | None:
    """The node on whose CPUs alone a process may run; None if there is no such one node.

    Nor is there anything to choose on a machine with a single node.  ``nodes`` maps each node
    to its CPUs; one may have none, as memory of another kind has.
    """
    if len(nodes) < 2 or not allowed:
        return None
    return next((node for node, cpus in nodes.items() if set(allowed) <= set(cpus)), None)


def machine_nodes(folder: Path = NODES) -> dict[int, frozenset[int]]:
    """The nodes of this machine with their CPUs; {} where the kernel tells of none."""
    found = {}
    for path in folder.glob("node[0-9]*"):
        text = (path / "cpulist").read_text().strip()
        found[int(path.name[4:])] = parse_cpus(text) if text else frozenset[int]()
    return found


def node_of_process(pid: int) -> int | None:
    """The home node of a process on this machine, if it has one."""
    try:
        return home_node(os.sched_getaffinity(pid), machine_nodes())
    except (OSError, ValueError):
        return None


@contextmanager
def preferring(node: int | None) -> Iterator[bool]:
    """Pages that this thread makes inside are asked for on a node, if it has room.

    That holds for pages of files on a tmpfs, allocated or touched (set_mempolicy(2)); other
    threads are not concerned.  Gives whether the kernel agreed; None asks for nothing.
    """
    agreed = node is not None and _set_policy(_MPOL_PREFERRED, node)
    try:
        yield agreed
    finally:
        if agreed:
            _set_policy(_MPOL_DEFAULT, None)


def _set_policy(mode: int, node: int | None) -> bool:
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or (node is not None and not 0 <= node < _MOST_NODES):
        return False
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    failed = libc.syscall(call, mode, mask, ctypes.c_ulong(_MOST_NODES + 1))
    if failed:
        log.info("pages cannot be asked for on node %s: %s", node, os.strerror(ctypes.get_errno()))
    return not failed
