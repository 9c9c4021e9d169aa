"""Why incarnations of a job end, and what nodes say that the next one must know.

Kills by the kernel for want of memory, as the memory cgroups of this machine count them.

A process that the OOM killer ends looks like any other that is ended by signal 9.
"""

from __future__ import annotations

import signal
from pathlib import Path

from megatron_ft.arena.limits import CGROUP_ROOT, PROC, cgroup_folders
from megatron_ft.core.errors import error_class
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.process_tools import last_lines
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.budget import Failure
from megatron_ft.supervisor.coordinator import Coordinator
from megatron_ft.supervisor.events import JobEvent
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.processes import TrainerExit, TrainerFleet

_COUNTERS = ("memory.events", "memory.oom_control")
"""Of version 2, where a group counts those below it too, and of version 1."""


class OomKills:
    """Counts of the memory cgroup of this process and of those above it, since the last look.

    Groups of other machines, and of processes outside of these groups, are not seen.
    """

    def __init__(self, cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = cgroup_root, proc
        self._seen = self._read()

    def look(self) -> str:
        """The group in which most processes were killed since the last look, "" if there is none.

        For the end of a sentence that tells of a death by signal 9.
        """
        now = self._read()
        risen = {group: count - self._seen.get(group, 0) for group, count in now.items()}
        self._seen = now
        count, group = max(((n, str(g)) for g, n in risen.items()), default=(0, ""))
        if count <= 0:
            return ""
        return (
            f"; the kernel has just killed {count} processes of memory cgroup {group} for want of "
            "memory: raise its limit, or use fewer slots or less parity"
        )

    def _read(self) -> dict[Path, int]:
        try:
            membership = (self._proc / "self" / "cgroup").read_text()
        except OSError:
            return {}
        counts = {}
        for folder, _ in cgroup_folders(self._root, membership):
            for name in _COUNTERS:
                count = _oom_kill(folder / name)
                if count is not None:
                    counts[folder] = count
        return counts


def _oom_kill(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(values[0]) if values and values[0].isdecimal() else None


RERUN_CODES = (16, 17)
"""Of Megatron's rerun state machine: a result was doubtful, which is no fault of the snapshot."""

NODE_LOST = "a node was lost"
"""The cause of failures that a node's loss has led to."""


class JobNotes:
    """What was heard over all incarnations: shards whose bytes are wrong, a command that cannot
    work.

    It hears the coordinator's messages and events by itself.
    """

    def __init__(self, state: JobState, coordinator: Coordinator) -> None:
        self._state, self._coordinator = state, coordinator
        self._corrupt: set[tuple[str, SnapshotId]] = set()
        self._unfit: m.Unfit | None = None
        self.oom = OomKills()
        coordinator.listeners += [self._note_corruption, self._note_rebuilt, self._note_unfit]
        coordinator.observers.add(self._note_first_commit)
        coordinator.observers.add(self._note_oom)

    @property
    def damaged(self) -> set[tuple[str, SnapshotId]]:
        """Shards that count as lost in these snapshots."""
        return self._corrupt | self._coordinator.repairs.lost

    def rebuild_failed(self, corrupt: str) -> None:
        """A rebuild of the snapshot being restored found a shard (or none: "") corrupt."""
        if corrupt and self._coordinator.restoring is not None:
            self._corrupt.add((corrupt, self._coordinator.restoring))

    def raise_if_unfit(self) -> None:
        """The same command would fail the same way; the snapshot stays for the right one."""
        if self._unfit is not None:
            raise error_class(self._unfit.error)(self._unfit.reason)

    def _note_corruption(self, event: m.Event) -> None:
        if isinstance(event.body, m.CorruptShard):
            self._corrupt.add((event.body.shard_id, event.body.snapshot))
            self._coordinator.observers.tell(
                "corrupt",
                f"{event.body.blocks} blocks of {event.body.shard_id} fail their digests; the "
                "shard counts as lost",
            )

    def _note_rebuilt(self, event: m.Event) -> None:
        if isinstance(event.body, m.Rebuilt):
            known = event.body.shard_id, event.body.snapshot
            self._corrupt.discard(known)
            self._coordinator.repairs.lost.discard(known)

    def _note_unfit(self, event: m.Event) -> None:
        if isinstance(event.body, m.Unfit):
            self._unfit = event.body

    def _note_oom(self, event: JobEvent) -> None:
        """An SMP or encoders that died alone may have been killed for want of memory."""
        if event.kind in ("smp_restarted", "world_ended") and (why := self.oom.look()):
            self._coordinator.observers.tell("oom", why.removeprefix("; "))

    def _note_first_commit(self, event: JobEvent) -> None:
        """From here on a start from nothing would lose work, so it has to be asked for."""
        if event.kind == "committed" and not self._state.record.committed:
            self._state.update(committed=True)


def trainer_failure(
    first: TrainerExit,
    trainers: TrainerFleet,
    launcher: Launcher,
    coordinator: Coordinator,
    oom: OomKills,
) -> Failure:
    """Say how the first trainer ended, with the end of its log, and whose fault that was."""
    rank, node, status = first.rank, first.node, first.status
    how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    # Not in the failure itself: a count in its text would make each one another.
    memory = oom.look() if status == -signal.SIGKILL else ""
    tell, who = coordinator.observers.tell, trainers.name_of(rank)
    tell("trainer_died", f"{who} on {node} {how}{memory}", rank=rank, node=node, status=status)
    if status > 0:
        log = trainers.log_of(rank)
        tell("log", f"end of {log}:\n{last_lines(log)}")
    text = f"{who} {how}"
    if not launcher.reachable(node):
        return Failure(text, NODE_LOST, node)
    if status in RERUN_CODES:
        why = f"{text}, as Megatron does to be resumed from its checkpoint (--rerun-mode)"
        return Failure(why, f"a trainer {how}")
    outside = -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    return Failure(text, f"a trainer {how}", node, training=not outside)
