"""The format of traces of a training run, and reading them; imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec


class TraceLine(msgspec.Struct, frozen=True):
    """One iteration of one rank.

    ``loss`` is float.hex of what the step returned, None where this rank has none
    (Megatron's log lines average the first two).  ``samples`` name what this rank read:
    indices, or checksums of the contents.  ``step_seconds`` is the step alone, ``seconds``
    the time since the last step ended, so with snapshots, checkpoints and logging, ``time``
    the end of the step in seconds since the epoch.  Iterations that are trained again are
    appended again.
    """

    rank: int
    incarnation: int
    iteration: int
    loss: str | None
    samples: list[int]
    step_seconds: float
    seconds: float
    time: float

    @property
    def loss_value(self) -> float | None:
        """The loss as a number."""
        return None if self.loss is None else float.fromhex(self.loss)


_DECODER = msgspec.json.Decoder(TraceLine)


def trace_path(directory: Path, rank: int) -> Path:
    """The file that holds one rank's lines."""
    return directory / f"rank{rank}.jsonl"


def final_path(directory: Path, rank: int) -> Path:
    """The file that holds one rank's state at the end of its run."""
    return directory / f"final-rank{rank}.pt"


def read_trace(directory: Path, rank: int) -> list[TraceLine]:
    """All complete lines of a rank in the order written, [] if there is no file.

    A rank that was killed while it wrote leaves half a line in the middle of the file.
    """
    path = trace_path(directory, rank)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [line for text in lines if (line := parse_line(text)) is not None]


def parse_line(text: bytes) -> TraceLine | None:
    """The line in ``text``, or None where only a part of one was written."""
    for start in (0, text.rfind(b'{"rank"')):
        try:
            return _DECODER.decode(text[start:])
        except msgspec.MsgspecError:
            continue
    return None


def final_lines(lines: list[TraceLine]) -> dict[int, TraceLine]:
    """The line that counts for each iteration: the last one, as iterations may be repeated."""
    return {line.iteration: line for line in lines}


@dataclass
class TraceTail:
    """Follows one rank's file while it is being written."""

    path: Path
    _file: IO[bytes] | None = None
    _rest: bytes = b""

    def read(self) -> list[TraceLine]:
        """Lines that were completed since the last call."""
        if self._file is None:
            if not self.path.exists():
                return []
            self._file = self.path.open("rb")
        *complete, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line for text in complete if (line := parse_line(text)) is not None]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
