"""Snapshots in the arenas of a job, running or stopped, as a source to read from.

Where an SMP runs, the snapshot is pinned with it for as long as it is read; where none
runs, arenas are read as they lie.  Either way a slot's header is looked at again after
the last read, since an SMP that was restarted has forgotten its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.arenas import Memory, hold, scan
from megatron_ft.checkpoint.decide import Holding, candidates
from megatron_ft.checkpoint.rebuilt import Survivors
from megatron_ft.checkpoint.source import OpenSnapshot, SnapshotInfo
from megatron_ft.core.errors import ConfigError, SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc.messages import SlotReport
from megatron_ft.rpc.pin import pinned
from megatron_ft.smp.store import SUFFIX


def open_live(root: Path, job: str, *, shards: Collection[str] = ()) -> LiveSource:
    """The arenas of ``job`` under ``root``, those of all its nodes on this machine.

    ``shards`` are shard ids that the job is known to have; without them a shard whose
    stripe left no trace (a lost node of a job without parity) cannot be missed.
    ConfigError if there is no such job.
    """
    folders = node_folders(root / job)
    if not folders:
        raise ConfigError(
            f"no arenas of a job {job!r} under {root}; `megatron-ft status` lists the jobs here, "
            "--arena-dir names another folder"
        )
    return LiveSource(folders, shards)


def node_folders(job_folder: Path) -> list[Path]:
    """Folders of the job's nodes that hold arenas; links are not followed."""
    return sorted(
        folder
        for folder in job_folder.glob("[!.]*")
        if not folder.is_symlink() and any(folder.glob(f"*{SUFFIX}"))
    )


class LiveSource:
    """A SnapshotSource over the arenas in some nodes' folders."""

    def __init__(self, folders: Sequence[Path], shards: Collection[str] = ()) -> None:
        self._folders, self._known = list(folders), set(shards)
        self._problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"the memory in {self._folders[0].parent}"

    @property
    def problems(self) -> tuple[str, ...]:
        """See SnapshotSource."""
        return self._problems

    def snapshots(self) -> list[SnapshotInfo]:
        """See SnapshotSource; one whose outcome is still open is left out."""
        with scan(self._folders) as memory:
            infos, self._problems = complete_snapshots(memory, self._known)
        return infos

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        """See SnapshotSource."""
        with scan(self._folders) as memory:
            shards = self._known | _members(memory.holdings)
            nodes = {memory.holdings[s].node for s in shards if s in memory.holdings}
            with (
                pinned([memory.folders[node] for node in sorted(nodes)], info.snapshot),
                hold(memory, info, shards) as opened,
            ):
                yield opened


def _members(holdings: Mapping[str, Holding]) -> set[str]:
    """Every shard that some arena names as one of its stripe."""
    return {member for holding in holdings.values() for member in holding.arena.members}


def complete_snapshots(
    memory: Memory, known: Collection[str] = ()
) -> tuple[list[SnapshotInfo], tuple[str, ...]]:
    """Decided snapshots that every shard holds, or that parity gives back for those that do not,
    newest first; and what is in the way of others.
    """
    shards = _members(memory.holdings) | set(known)
    infos: list[SnapshotInfo] = []
    problems, undecided = list(memory.damaged), []
    missing = sorted(shards - memory.holdings.keys())
    if missing:
        problems.append(f"no arena of {', '.join(missing)}: its node is lost, or elsewhere")
    for snapshot in candidates(memory.holdings):
        slots = {s: h.slot(snapshot) for s, h in memory.holdings.items()}
        held = [slot for slot in slots.values() if slot is not None]
        absent = sorted(s for s in shards if slots.get(s) is None)
        lacking = [s for s in absent if not _can_be_rebuilt(memory.holdings, s, snapshot)]
        if not _decided(held):
            undecided.append(f"snapshot {snapshot} is not committed")
        elif lacking:
            problems.append(f"snapshot {snapshot} is not held by {', '.join(lacking)}")
        else:
            level = "protected" if all(slot.parity_valid for slot in held) else "local"
            infos.append(SnapshotInfo(snapshot, held[0].iteration, level))
    # Beside a complete one, a snapshot that is still on its way is nothing to worry about.
    return infos, tuple(problems if infos else problems + undecided)


def _can_be_rebuilt(holdings: Mapping[str, Holding], shard_id: str, snapshot: SnapshotId) -> bool:
    try:
        Survivors.find(holdings, shard_id, snapshot)
    except SnapshotUnavailableError:
        return False
    return True


def _decided(slots: Sequence[SlotReport]) -> bool:
    """Rule 6: one COMMITTED slot, or PROTECTED everywhere, can only become COMMITTED everywhere."""
    states = {SlotState(slot.state) for slot in slots}
    # Committed without parity, and given some just now.
    again = any(slot.state == SlotState.ENCODING and slot.local_only for slot in slots)
    return again or SlotState.COMMITTED in states or states == {SlotState.PROTECTED}
