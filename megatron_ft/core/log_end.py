"""The ends of logs, for messages: what a process said last."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 1 << 16
"""A trainer's log may have gigabytes, and leases are renewed by whoever reads it."""

_NO_REASON = ("srun: error: ", "srun: launch/slurm: ")
"""What srun adds to a step's log: that it ended, but not why."""


def last_lines(path: Path, count: int = 15) -> str:
    """The last ``count`` lines, of at most 64 KiB; that there are none if it cannot be read."""
    try:
        return "\n".join(_tail(path)[-count:])
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"


def size(path: Path) -> int:
    """Bytes in a log, 0 if there is none: where what is started now begins to write."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_word(path: Path, since: int = 0) -> str:
    """The last line that the process itself wrote, as far as anybody can tell.

    With ``since`` only what follows that byte counts: earlier processes wrote the rest.
    """
    try:
        lines = _tail(path, since)
    except OSError:
        return last_lines(path)
    if since and not lines:
        return f"it wrote nothing to {path}"
    own = [line for line in lines if line and not line.startswith(_NO_REASON)]
    return (own or lines or [""])[-1]


def text_since(path: Path, since: int) -> str:
    """The log from byte ``since`` on, at most its last 64 KiB; empty if it cannot be read."""
    try:
        return "\n".join(_tail(path, since))
    except OSError:
        return ""


def _tail(path: Path, since: int = 0) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(since, path.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
