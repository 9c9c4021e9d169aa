"""All that findings depend on: what the nodes say of themselves, and what the user wants.

A process's answer comes back as one marked line of JSON among whatever else its log holds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from megatron_ft.arena.limits import MemoryReading
from megatron_ft.core.identity import MAY_SHRINK, RankRule
from megatron_ft.core.scheme import Scheme

if TYPE_CHECKING:
    from megatron_ft.config import SnapshotConfig
    from megatron_ft.supervisor.health import Vote
    from megatron_ft.supervisor.spec import JobSpec


class ProbeRequest(msgspec.Struct, frozen=True):
    """The work of a probe: ``token`` names its files; all nodes share the ``folders``."""

    token: str
    arena_root: str
    folders: tuple[str, ...] = ()


class ArenaPlace(msgspec.Struct, frozen=True):
    """The folder of a node's arenas.  ``device`` and ``inode`` are of the marker file in it."""

    folder: str
    filesystem: str = ""
    total_bytes: int = 0
    limits: tuple[MemoryReading, ...] = ()
    device: int = 0
    inode: int = 0
    error: str = ""


class SharedFolder(msgspec.Struct, frozen=True):
    """A folder that all nodes should share, as one of them sees it.

    ``same``: the doctor's file is there.  ``distrust`` says why a job would not trust a file that
    this node makes there.
    """

    same: bool = False
    free_bytes: int = 0
    distrust: str = ""
    error: str = ""


class NodeFacts(msgspec.Struct, frozen=True):
    """One node as its probe found it.

    ``machine`` is the same for nodes that share a kernel; ``pid_namespace`` for processes that
    know each other by number.  ``code`` is a digest of this package's sources.
    ``removes_ipc``: logind will remove the user's files in /dev/shm.  ``copies`` says how bytes
    are copied and digested there, ``copies_advice`` how that can be faster; ``cores`` are those
    that its processes share.
    """

    machine: str
    user: int
    code: str
    cgroup: str
    removes_ipc: bool
    arena: ArenaPlace
    pid_namespace: int = 0
    folders: dict[str, SharedFolder] = {}
    copies: str = ""
    copies_advice: str = ""
    cores: int = 0


class TrainerFacts(msgspec.Struct, frozen=True):
    """View of a process that was started as a trainer; ``device`` and ``inode`` of the same marker.

    ``pid_namespace`` is 0, and ``user`` -1, where they are not known; ``cores`` are those that it
    may run on.
    """

    python: str
    executable: str
    packages: dict[str, str]
    cgroup: str
    device: int = 0
    inode: int = 0
    error: str = ""
    pid_namespace: int = 0
    user: int = -1
    cores: int = 0


class TrialRank(msgspec.Struct, frozen=True):
    """One rank of the trial world; ``silent`` are the ranks that did not answer it."""

    node: str
    library: str
    size: int
    device: int = 0
    inode: int = 0
    silent: tuple[int, ...] = ()


class WorldFacts(msgspec.Struct, frozen=True):
    """The trial world over all nodes: its ranks by node.

    ``error`` says why there is none, ``broken`` are nodes without which one starts.  ``tcp``: it is
    over TCP, not MPI; ``no_mpi`` says why no MPI can be loaded, if nobody asked for TCP.
    """

    ranks: dict[str, TrialRank] = {}
    broken: tuple[str, ...] = ()
    error: str = ""
    tcp: bool = False
    no_mpi: str = ""


class AskedJob(msgspec.Struct, frozen=True):
    """The job that ``run`` would start, and what the doctor alone knows of it.

    ``scheme`` is what the user asks for; ``spec`` has none where its nodes are too few.
    ``shard_bytes`` is 0 if nobody said how large a shard is, ``domains_from`` the file of failure
    domains.  ``noted`` is the job of which there are notes already.  ``rank_rule`` says with how
    many ranks it may continue, None if only the ranks will say; ``shrink_refusals`` are why its
    ranks will refuse to.
    """

    spec: JobSpec
    scheme: Scheme
    active: tuple[str, ...]
    spares: tuple[str, ...]
    shard_bytes: int = 0
    domains_from: str = ""
    noted: uuid.UUID | None = None
    megatron: bool = False
    deepspeed: bool = False
    rank_rule: RankRule | None = None
    shrink_refusals: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.active, *self.spares)

    @property
    def settings(self) -> SnapshotConfig:
        return self.spec.settings

    @property
    def shrinks(self) -> bool:
        return self.settings.on_no_spare in MAY_SHRINK

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders that all nodes should share."""
        wanted = (self.settings.drain_dir, self.settings.drain_export_dir)
        return tuple(str(folder) for folder in wanted if folder)


class Facts(msgspec.Struct, frozen=True):
    """All that was found out.  A node that could not be asked has the reason instead.

    ``seen_here`` are, by folder, the nodes whose files are seen in it where the doctor runs.
    ``no_kill`` is None outside of Slurm, else whether ``--no-kill`` is seen; ``grace_lost`` is
    whether preemption ends trainers as its grace time begins.  ``exporter`` is the
    other job that exports to the folder now, in words.  ``votes`` are those of the health command.
    """

    job: AskedJob
    nodes: dict[str, NodeFacts | str]
    trainers: dict[str, TrainerFacts | str]
    world: WorldFacts | None = None
    seen_here: dict[str, tuple[str, ...]] = {}
    no_kill: bool | None = None
    grace_lost: bool = False
    exporter: str = ""
    votes: Mapping[str, Vote] = {}

    @property
    def answered(self) -> dict[str, NodeFacts]:
        return {name: facts for name, facts in self.nodes.items() if not isinstance(facts, str)}

    @property
    def as_trainers(self) -> dict[str, TrainerFacts]:
        """Views of trainers on the nodes where one could be started."""
        return {n: facts for n, facts in self.trainers.items() if not isinstance(facts, str)}


MARK = "MEGATRON-FT-DOCTOR "

T = TypeVar("T")


def say(value: Any) -> None:
    print(MARK + msgspec.json.encode(value).decode(), flush=True)


def answers(log: Path, kind: type[T]) -> Iterator[T]:
    """All answers in a log; lines of others, and half lines, are left out."""
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
