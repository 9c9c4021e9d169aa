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


def last_word(path: Path) -> str:
    """The last line that the process itself wrote, as far as anybody can tell."""
    try:
        lines = _tail(path)
    except OSError:
        return last_lines(path)
    own = [line for line in lines if line and not line.startswith(_NO_REASON)]
    return (own or lines or [""])[-1]


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
