"""Export what was drained: ``python -m megatron_ft.export.drained export PLAN``.

The supervisor starts this short-lived process on one node after a drain, when it was asked to.
Exports that were made so are written down in their folder, because only they may be removed:
the folder may hold checkpoints of the framework's own as well.
"""

from __future__ import annotations

import logging
import shutil
import sys
import uuid
from pathlib import Path

import msgspec

from megatron_ft.disk.checkpoint import open_checkpoint
from megatron_ft.disk.drain import DrainPlan, run_step
from megatron_ft.disk.durable import Disk
from megatron_ft.disk.source import open_newest
from megatron_ft.export.formats import format_of, writer_of

log = logging.getLogger(__name__)

LEDGER = ".megatron-ft-exports.json"
"""In a folder of exports: by job, the names of those made after its drains, oldest first."""

Ledger = dict[uuid.UUID, list[str]]


def superfluous(names: list[str], keep: int) -> list[str]:
    """Names beyond the last ``keep``, in their order.  Pure."""
    return names[: max(0, len(names) - keep)]


def export(plan: DrainPlan) -> None:
    """Export the drained checkpoint of the plan, then remove older exports of the job.

    A folder that is there already is left as it is.
    """
    directory = plan.export_dir
    assert directory is not None
    Disk().make_folder(directory)
    with open_newest(open_checkpoint(plan.folder)) as shards:
        writer = writer_of(format_of(shards))
        folder = writer.folder_of(directory, plan.iteration)
        if folder.exists():
            log.info("%s is there already", folder)
            if folder.name in _read(directory).get(plan.job, []):
                # One that appeared is whole, but this may have been cut off before the next line.
                writer.announce(directory, plan.iteration)
            return
        # First, so that one that is cut off is known to be ours.
        _note(directory, plan.job, folder.name)
        writer.export(shards, folder)
        writer.announce(directory, plan.iteration)
    log.info("exported iteration %d to %s", plan.iteration, folder)
    _clean_up(directory, plan.job, plan.keep.newest)


def _note(directory: Path, job: uuid.UUID, name: str) -> None:
    ledger = _read(directory)
    ledger[job] = [known for known in ledger.get(job, []) if known != name] + [name]
    _write(directory, ledger)


def _clean_up(directory: Path, job: uuid.UUID, keep: int) -> None:
    ledger = _read(directory)
    whole = [name for name in ledger[job] if (directory / name).is_dir()]
    for name in superfluous(whole, keep):
        shutil.rmtree(directory / name)
        log.info("removed %s", directory / name)
    ledger[job] = whole[-keep:]
    _write(directory, ledger)


def _read(directory: Path) -> Ledger:
    path = directory / LEDGER
    return msgspec.json.decode(path.read_bytes(), type=Ledger) if path.is_file() else {}


def _write(directory: Path, ledger: Ledger) -> None:
    Disk().write_file(directory / LEDGER, [msgspec.json.encode(ledger)])


if __name__ == "__main__":
    sys.exit(run_step({"export": export}, "python -m megatron_ft.export.drained"))
