"""Which networks there are on this machine, of whom, and what is cut in them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from megatron_ft.core import procfs
from megatron_ft.core.environment import NODE
from tests.support import namespaces as ns
from tests.support.network_names import NOTES, NetworkNames
from tests.support.networked_cluster import HOST

RELAY = "MEGATRON_FT_RELAY"
"""Marks a relay process with its network's prefix and its node, in its environment."""

_FILE = "network.json"


class Note(msgspec.Struct, frozen=True):
    """One network and the process that made it, or opened it last."""

    job: str
    nodes: tuple[str, ...]
    subnet: str
    pid: int
    start_time: int


@contextmanager
def locked() -> Iterator[None]:
    """Only one process at a time makes or removes networks."""
    NOTES.mkdir(mode=0o700, exist_ok=True)
    with open(NOTES / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(names: NetworkNames) -> None:
    """This process is the owner of the network from now on."""
    stat = procfs.read_stat(os.getpid())
    assert stat is not None, "this process runs"
    note = Note(names.job, names.nodes, names.subnet, os.getpid(), stat.start_time)
    (names.notes / "cuts").mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = names.notes / f"{_FILE}.tmp"
    temporary.write_bytes(msgspec.json.encode(note))
    temporary.replace(names.notes / _FILE)


def read(folder: Path) -> Note | None:
    """The note in a network's folder; None where there is none that can be read."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=Note)
    return None


def all_networks() -> list[NetworkNames]:
    """Every network of ours on this machine."""
    folders = [f for f in NOTES.glob("mft*") if f.is_dir()] if NOTES.is_dir() else []
    notes = {folder: read(folder) for folder in folders}
    return [NetworkNames(n.job, n.nodes, f.name, n.subnet) for f, n in notes.items() if n]


def in_use(names: NetworkNames) -> bool:
    """Whether its owner lives, or a process is in one of its namespaces."""
    note = read(names.notes)
    stat = None if note is None else procfs.read_stat(note.pid)
    if note is not None and stat is not None and stat.start_time == note.start_time:
        return True
    return any(ns.processes_in(names.namespace(node)) for node in names.nodes)


def remove(names: NetworkNames) -> None:
    """Remove all of a network.  Processes in it are not ended, they are left without one."""
    kill_relays(names.prefix)
    host = names.namespace(HOST)
    if (ns.FOLDER / host).exists():
        devices = [d for d in ns.links(host) if d.startswith(names.prefix)]
        for device in sorted(devices, key=lambda d: d == names.bridge):
            ns.ip("link", "delete", device, inside=host)
    for place in (*names.nodes, HOST):
        ns.remove_namespace(names.namespace(place))
    shutil.rmtree(names.notes, ignore_errors=True)


def kill_relays(mark: str) -> None:
    """End the relays with this mark, or of the network with this prefix, and await their end."""

    def matches(pid: int) -> bool:
        env = procfs.read_environment(pid)
        value = env.get(RELAY, "")
        return NODE not in env and (value == mark or value.startswith(f"{mark}/"))

    procfs.kill_matching(matches, f"delays of network {mark}")
