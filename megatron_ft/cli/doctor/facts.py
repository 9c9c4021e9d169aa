"""All that findings depend on: what the nodes say of themselves, and what the user wants.

A probe's answer comes back as one marked line of JSON among whatever else a log holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_ft.arena.limits import MemoryReading
from megatron_ft.core.scheme import Scheme


class ProbeRequest(msgspec.Struct, frozen=True):
    """The work of a probe; ``token`` names the files that it may make."""

    token: str
    arena_root: str
    scheme: str
    drain_dir: str = ""
    rate_bytes: int = 64 << 20
    export_dirs: tuple[str, ...] = ()


class Leftover(msgspec.Struct, frozen=True):
    """A job's folder below the root of all arenas; ``process`` names the process that uses it."""

    job: str
    allocated_bytes: int
    process: str


class ArenaPlace(msgspec.Struct, frozen=True):
    """The folder of a node's arenas.  ``device`` and ``inode`` are of the marker file in it."""

    folder: str
    filesystem: str = ""
    total_bytes: int = 0
    limits: tuple[MemoryReading, ...] = ()
    device: int = 0
    inode: int = 0
    leftovers: tuple[Leftover, ...] = ()
    error: str = ""


class Rates(msgspec.Struct, frozen=True):
    """Bytes a second: memory to memory, memory to arena, and data through the codec.

    A rate of 0 was not measured; ``error`` says why.
    """

    memory: float = 0.0
    arena: float = 0.0
    encode: float = 0.0
    error: str = ""


class DrainPlace(msgspec.Struct, frozen=True):
    """The drain folder: bytes a second with fsync, and the token read in it."""

    rate: float = 0.0
    token: str = ""
    free_bytes: int = 0
    error: str = ""


class ExportPlace(msgspec.Struct, frozen=True):
    """A folder of exports on a node: whether the doctor's file in it is the ``same`` there.

    ``locked`` is whether the node sees that the doctor has locked that; ``problem`` says why
    nothing can be locked there.
    """

    same: bool = False
    locked: bool = False
    problem: str = ""
    error: str = ""


class ExportFolder(msgspec.Struct, frozen=True):
    """A folder of exports where the supervisor is to run, and the ``flag`` that names it.

    ``holder`` is the other job that exports there now, in words; ``problem`` says why it cannot
    be locked.
    """

    flag: str
    folder: str
    holder: str = ""
    problem: str = ""


class NodeFacts(msgspec.Struct, frozen=True):
    """One node as its probe found it.

    ``machine`` is the same for nodes that share a kernel; ``pid_namespace`` for processes that
    know each other by number.  ``code`` is a digest of this
    package's sources.  ``began`` and ``ended`` are wall-clock seconds; the resource limits are
    soft ones, -1 for none.  ``remove_ipc`` is None where there is no logind.  ``exports`` are by
    folder.
    """

    machine: str
    host: str
    user: int
    python: str
    packages: dict[str, str]
    code: str
    cpus: int
    began: float
    ended: float
    locked_memory: int
    descriptors: int
    descriptors_hard: int
    remove_ipc: bool | None
    lingers: bool
    cgroup: str
    arena: ArenaPlace
    rates: Rates
    drain: DrainPlace | None
    pid_namespace: int = 0
    exports: dict[str, ExportPlace] = {}


class TrainerFacts(msgspec.Struct, frozen=True):
    """View of a process that was started as a trainer; ``device`` and ``inode`` of the same marker.

    ``pid_namespace`` is 0, and ``user`` -1, where they are not known.
    """

    python: str
    executable: str
    packages: dict[str, str]
    cpus: int
    cgroup: str
    device: int = 0
    inode: int = 0
    error: str = ""
    pid_namespace: int = 0
    user: int = -1


class WorldRank(msgspec.Struct, frozen=True):
    """One rank of the world that has joined."""

    library: str
    fabric: str
    device: int = 0
    inode: int = 0


class WorldFacts(msgspec.Struct, frozen=True):
    """The world over all nodes: who joined, and bytes a second by pair of nodes, 0 for no answer.

    ``launcher`` is which mpirun was used, if known.  ``broken`` are nodes without which worlds
    start; ``error`` says why there is no world at all.  ``tcp``: it is over TCP, not MPI, and
    ``no_mpi`` says why no MPI can be loaded, if nobody asked for TCP.
    """

    joined: dict[str, WorldRank] = {}
    rates: dict[tuple[str, str], float] = {}
    launcher: str = ""
    broken: tuple[str, ...] = ()
    error: str = ""
    tcp: bool = False
    no_mpi: str = ""


class Clock(msgspec.Struct, frozen=True):
    """Lead of a node's clock in seconds: between ``least`` and ``most``."""

    least: float
    most: float


class Wishes(msgspec.Struct, frozen=True):
    """The user's wishes.  ``shard_bytes`` is None if nobody said how large a shard is.

    ``shard_source`` says where the number comes from.  ``domains_from`` is the source of
    failure domains, empty for nodes.  ``container`` is what puts trainers into one, empty if
    nothing is seen to.  ``exports`` are folders by the flags that name them; ``job`` is the one
    of which there are notes already.
    """

    scheme: Scheme
    active: tuple[str, ...]
    spares: tuple[str, ...]
    ranks_per_node: int
    slot_count: int
    domains: dict[str, str] = {}
    domains_from: str = ""
    shard_bytes: int | None = None
    shard_source: str = ""
    drain_dir: str = ""
    drain_keep: int = 1
    transport: str = "auto"
    megatron: bool = False
    deepspeed: bool = False
    command_python: bool = True
    container: str = ""
    exports: dict[str, str] = {}
    job: uuid.UUID | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, spares last."""
        return (*self.active, *self.spares)


class Facts(msgspec.Struct, frozen=True):
    """All that was found out.  A node that could not be asked has the reason instead.

    ``no_kill`` is None outside of Slurm, else what is known of ``--no-kill``.
    """

    wishes: Wishes
    nodes: dict[str, NodeFacts | str]
    trainers: dict[str, TrainerFacts | str]
    clocks: dict[str, Clock]
    world: WorldFacts | None = None
    drain_tokens: dict[str, str] = {}
    no_kill: str | None = None
    exports: tuple[ExportFolder, ...] = ()

    @property
    def answered(self) -> dict[str, NodeFacts]:
        """Nodes that could be asked."""
        return {name: facts for name, facts in self.nodes.items() if not isinstance(facts, str)}

    @property
    def one_machine(self) -> bool:
        """True if several nodes share one machine, and with it its cores and its memory."""
        machines = [said.machine for said in self.answered.values()]
        return len(set(machines)) < len(machines)

    @property
    def as_trainers(self) -> dict[str, TrainerFacts]:
        """Views of trainers on the nodes where one could be started."""
        return {n: facts for n, facts in self.trainers.items() if not isinstance(facts, str)}


MARK = "MEGATRON-FT-DOCTOR "

T = TypeVar("T")


def say(value: Any) -> None:
    """Print an answer."""
    print(MARK + msgspec.json.encode(value).decode(), flush=True)


def answers(log: Path, kind: type[T]) -> Iterator[T]:
    """All answers of one kind in a log; lines of others, and half lines, are left out."""
    text = log.read_text(errors="replace") if log.exists() else ""
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if mark:
            try:
                yield msgspec.json.decode(rest, type=kind)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue


def last_words(log: Path) -> str:
    """The end of what a process printed besides answers, for an error message."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    return " | ".join(lines[-3:])[-400:] or "it printed nothing"
