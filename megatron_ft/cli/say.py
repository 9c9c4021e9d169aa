"""What commands print: that nobody reads it, or that a disk is full, ends no training."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO


def show_any_text() -> None:
    """Write what the terminal's encoding lacks as escapes: names of files, words of trainers."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line at once, to the standard output if not ``to`` another; it is lost if it cannot
    be written."""
    with suppress(OSError):
        print(text, file=to, flush=True)


def flush_output() -> None:
    """Write what was printed; OSError.  Who was started without an output has none."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> None:
    """Nothing is written any more, not by the interpreter's last flush either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
