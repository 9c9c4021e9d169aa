"""Runs a shell command whose output may be endless: ``python -I -S bounded_command.py COMMAND``.

The first bytes of the output are passed on, then the last ones.  This process ends as soon as the
command itself has; what it leaves running is its starter's to kill.  It imports nothing of this
package, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import BinaryIO

FIRST_BYTES = 1 << 16
LAST_BYTES = 1 << 12
REST_SECONDS = 0.2
"""Wait for output behind the end: processes that the command leaves may hold the pipe open."""


class Tail:
    """Passes the beginning of a stream on to standard output and keeps its end."""

    def __init__(self, stream: BinaryIO) -> None:
        self.end = b""
        self._stream, self._left = stream, FIRST_BYTES

    def read(self) -> None:
        while piece := os.read(self._stream.fileno(), 1 << 16):
            os.write(1, piece[: self._left])
            self.end = (self.end + piece[self._left :])[-LAST_BYTES:]
            self._left -= len(piece[: self._left])


def main(command: str) -> int:
    """The command's exit status, 1 if a signal ended it."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, shell=True, **streams)  # type: ignore[call-overload]
    tail = Tail(child.stdout)
    reader = threading.Thread(target=tail.read, daemon=True)
    reader.start()
    status: int = child.wait()
    reader.join(REST_SECONDS)
    os.write(1, b"\n...\n" + tail.end if tail.end else b"")
    if status < 0 or status > 128:
        os.write(1, f"\nit was killed by signal {(abs(status) - 1) % 128 + 1}\n".encode())
        return 1
    return status


if __name__ == "__main__":
    # Not sys.exit, which waits for nobody but flushes what a reader may hold.
    os._exit(main(sys.argv[1]))
