"""Drain one snapshot: ``python -m megatron_ft.checkpoint.drain {clear,write,publish,tidy} PLAN``.

The supervisor starts these short-lived processes on nodes: ``clear``, ``publish`` and
``tidy`` on one, ``write`` on every node that has shards.  PLAN is a DrainPlan as JSON.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_ft.checkpoint.arenas import hold, scan
from megatron_ft.checkpoint.manifest import folder_name, is_complete
from megatron_ft.checkpoint.retention import Keep, clean_up, clear_unfinished
from megatron_ft.checkpoint.source import SnapshotInfo
from megatron_ft.checkpoint.write import publish, write_shards
from megatron_ft.core.affinity import bind_to_background_cpus
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import DrainError, MegatronFTError
from megatron_ft.core.fault_points import reach
from megatron_ft.core.gate import QuietGate
from megatron_ft.core.identity import Ancestor, Seat, SnapshotId
from megatron_ft.core.pace import Pace
from megatron_ft.core.priority import lower_priority
from megatron_ft.core.word import open_word
from megatron_ft.rpc.errand import begin_errand
from megatron_ft.rpc.pin import pinned

log = logging.getLogger(__name__)


class DrainPlan(msgspec.Struct, frozen=True):
    """What is drained, by whom, and where to.

    ``shards`` are those of the node that the plan is for with their seats, ``shard_count`` is
    of the whole job.  ``keep`` says what stays in ``directory``, on the file system that was
    mounted at ``mount`` when the job started (None: not looked at); ``bandwidth_mib`` is MiB/s
    a node, 0 for no cap.  ``export_dir`` gets a checkpoint of the training framework's own, made
    of what was drained; None for none.
    """

    job: uuid.UUID
    snapshot: SnapshotId
    iteration: int
    level: str
    lineage: tuple[Ancestor, ...]
    directory: Path
    shard_count: int
    shards: dict[str, Seat] = {}
    keep: Keep = Keep(2)
    bandwidth_mib: float = 0.0
    export_dir: Path | None = None
    mount: Path | None = None

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.directory / folder_name(self.job, self.iteration, self.snapshot)

    @property
    def info(self) -> SnapshotInfo:
        """The snapshot as it is in memory."""
        return SnapshotInfo(self.snapshot, self.iteration, self.level)

    def to_json(self) -> str:
        """The process's argument."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls, text: str) -> DrainPlan:
        """The plan back."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


def run_step(steps: Mapping[str, Callable[[DrainPlan], None]], program: str) -> int:
    """Do the step of ``steps`` that the command line names, at low priority.

    Exit codes: 0 done, 1 failed, and the last line of output says why.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("step", choices=sorted(steps))
    parser.add_argument("plan", type=DrainPlan.from_json)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lower_priority()
    try:
        bind_to_background_cpus()
        begin_errand(options.step)
        _check_mounted(options.plan)
        steps[options.step](options.plan)
    except (MegatronFTError, OSError) as error:
        log.error("%s", error)
        return 1
    return 0


def _check_mounted(plan: DrainPlan) -> None:
    """Below a mount point that lost its file system there is another disk, each node's own."""
    if plan.mount is not None and not os.path.ismount(plan.mount):
        raise DrainError(
            f"{plan.mount} is not mounted any more: {plan.directory} was on it; mount it again, or "
            "start the job with another --drain-dir"
        )


def clear(plan: DrainPlan) -> None:
    """Remove what earlier drains of the job did not finish; what cannot be stays."""
    if plan.directory.exists():
        try:
            clear_unfinished(plan.directory, plan.job)
        except OSError as error:
            log.warning("what an earlier drain has left stays: %s", error)


def write(plan: DrainPlan) -> None:
    """Write the shards of this node; a checkpoint that is complete is left as it is."""
    if is_complete(plan.folder):
        return
    node = ProcessEnvironment.from_env().node_dir
    pace = Pace(plan.bandwidth_mib * (1 << 20), gate=QuietGate(open_word(node)))
    with (
        pinned([node], plan.snapshot),
        scan([node]) as memory,
        hold(memory, plan.info, plan.shards) as shards,
    ):
        reach("drain.held")
        if shards.job != plan.job:
            raise DrainError(f"{node} holds arenas of job {shards.job}, not of {plan.job}")
        written = write_shards(shards, plan.folder, pace=pace, seats=plan.shards)
    log.info("wrote %d bytes of iteration %d to %s", written, plan.iteration, plan.folder)


def finish(plan: DrainPlan) -> None:
    """Write the manifest.  Nothing is removed: this process may outlive its supervisor, and the
    job may go on from an older checkpoint."""
    if not is_complete(plan.folder):
        publish(plan.folder, plan.info, plan.job, plan.lineage, plan.shard_count)
    reach("drain.published")


def tidy(plan: DrainPlan) -> None:
    """Remove what is superfluous now; to be begun by a supervisor that knows of the manifest."""
    keep = replace(plan.keep, lineage=plan.lineage)
    try:
        for folder in clean_up(plan.directory, plan.job, keep):
            log.info("removed %s", folder)
    except OSError as error:
        raise DrainError(f"older checkpoints could not be removed: {error}") from error


STEPS: Mapping[str, Callable[[DrainPlan], None]] = {
    "clear": clear,
    "write": write,
    "publish": finish,
    "tidy": tidy,
}


if __name__ == "__main__":
    sys.exit(run_step(STEPS, "python -m megatron_ft.checkpoint.drain"))
