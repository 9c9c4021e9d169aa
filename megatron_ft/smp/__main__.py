"""Start an SMP: ``python -m megatron_ft.smp --address ADDRESS`` with credentials on stdin."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import msgspec

from megatron_ft.arena.limits import format_bytes
from megatron_ft.core import private_files
from megatron_ft.core.background import bind_to_background_cpus
from megatron_ft.core.environment import NODE_DIR, READY_NAME, ProcessEnvironment
from megatron_ft.core.errors import UNREADABLE, MegatronFTError
from megatron_ft.smp.daemon import Credentials, NodePlace, run, write_pid

READY_SPARE = ".ready"
"""Space in the node's folder for the file by which the next SMP says that it serves."""

NOTES_BYTES = 64 << 10
"""Room for the small files of a node, and their successors; each takes a page at least."""


class Ready(msgspec.Struct, frozen=True):
    """Content of the file that says that an SMP serves, and where."""

    pid: int
    endpoint: str


def main() -> int:
    """Run until retired.  Exit codes: 0 retired, 1 refused (the log says why)."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.smp", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1", help="address that other nodes reach")
    parser.add_argument(
        "--ready", type=Path, help="file to say in where it serves (default: in the node's folder)"
    )
    arguments = parser.parse_args()
    # A scheduler's warning to all of a job must not end the memory before it was drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        bind_to_background_cpus()
        credentials = msgspec.json.decode(sys.stdin.buffer.read(), type=Credentials)
        environment = ProcessEnvironment.from_env()
        ready = arguments.ready or environment.node_dir / READY_NAME
        place = NodePlace(environment.node_dir, credentials.job)
        place.take()
        with closing(place):
            _serve(environment, credentials, arguments.address, ready, place)
    except (MegatronFTError, OSError, *UNREADABLE) as error:
        logging.error("%s", _full(error) or error)
        return 1
    return 0


def _full(error: BaseException) -> str:
    """The cause of an error and the way out, if the node's folder had no room for a small file."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    folder = Path(os.environ[NODE_DIR])
    while not folder.is_dir():
        folder = folder.parent
    space = os.statvfs(folder)
    return (
        f"{folder} is full: beside its arenas a node needs {format_bytes(NOTES_BYTES)} for its "
        f"notes there, and {format_bytes(space.f_bavail * space.f_frsize)} of "
        f"{format_bytes(space.f_blocks * space.f_frsize)} are free, with {space.f_favail} files; "
        "free some, enlarge the file system, or give another --arena-dir"
    )


def _serve(
    environment: ProcessEnvironment,
    credentials: Credentials,
    address: str,
    ready: Path,
    place: NodePlace,
) -> None:
    def announce(endpoint: str) -> None:
        write_pid(environment.node_dir)
        _write_ready(environment.node_dir / READY_SPARE, ready, endpoint)

    asyncio.run(run(environment, credentials, address, announce, place))


def _write_ready(reserved: Path, ready: Path, endpoint: str) -> None:
    """From space that an earlier SMP of this node reserved: the tmpfs may be full by now."""
    private_files.rewrite_file(reserved, msgspec.json.encode(Ready(os.getpid(), endpoint)))
    try:
        reserved.rename(ready)
    except OSError:  # another file system
        private_files.replace_file(ready, reserved.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
