"""Folders of exports: what they are like here, where the supervisor is to run, and on a node.

A job keeps others from its exports by a lock, which the supervisor takes and whatever writes on a
node shares.  So a lock is taken here, on a file of the doctor's own, and looked at everywhere.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron_ft.checkpoint.export_drained import held_by_other
from megatron_ft.cli.doctor.facts import ExportFolder, ExportPlace, Wishes


@contextmanager
def export_folders(wishes: Wishes, token: str) -> Iterator[tuple[ExportFolder, ...]]:
    """All of them as they are here; in each a locked file lies while the block runs.

    It is named ``token`` and has that in it.
    """
    with ExitStack() as held:
        yield tuple(
            ExportFolder(
                flag,
                folder,
                held_by_other(Path(folder), wishes.job),
                held.enter_context(_locked(Path(folder) / f"{token}.lock", token)),
            )
            for flag, folder in wishes.exports.items()
        )


def try_folder(folder: Path, token: str, node: str) -> ExportPlace:
    """Write to one on this node, and look at the file that ``export_folders`` has left there."""
    locked, own = folder / f"{token}.lock", folder / f"{token}.{node}.export"
    try:
        own.write_text(token)
        own.unlink()
        same = locked.exists() and locked.read_text() == token
    except OSError as error:
        # Without the file's name, so that nodes that fail alike are one line of the report.
        return ExportPlace(error=error.strerror or str(error))
    try:
        if same:
            with locked.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ExportPlace(same, locked=True)
    except OSError as error:
        return ExportPlace(same, problem=error.strerror or str(error))
    return ExportPlace(same)


@contextmanager
def _locked(path: Path, token: str) -> Iterator[str]:
    """Why the file that lies there meanwhile could not be locked, or ""."""
    problem = ""
    with ExitStack() as held:
        held.callback(_clear, path.parent, token)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.open("w"))
            file.write(token)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # Two flags name one folder.
        except OSError as error:
            problem = error.strerror or str(error)
        yield problem


def _clear(folder: Path, token: str) -> None:
    """Also what a probe that was killed has left."""
    for path in folder.glob(f"{token}*"):
        with suppress(OSError):
            path.unlink()
