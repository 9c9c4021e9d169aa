"""Start an SMP: ``python -m megatron_ft.smp --address ADDRESS`` with credentials on stdin."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path
from typing import IO

import msgspec

from megatron_ft import private_files
from megatron_ft.decoding import UNREADABLE
from megatron_ft.environment import READY_NAME, ProcessEnvironment
from megatron_ft.errors import ControlPlaneError, MegatronFTError
from megatron_ft.smp.daemon import Credentials, run

LOCK_NAME = "smp.lock"
PID_NAME = "smp.pid"
SLURM_JOB = "slurm-job"
"""Holds the number of the Slurm job that a node's folder is of, for scripts/slurm/epilog.sh."""


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
        credentials = msgspec.json.decode(sys.stdin.buffer.read(), type=Credentials)
        environment = ProcessEnvironment.from_env()
        ready = arguments.ready or environment.node_dir / READY_NAME
        _make_folders(environment.node_dir)
        if "SLURM_JOB_ID" in os.environ:
            (environment.node_dir / SLURM_JOB).write_text(os.environ["SLURM_JOB_ID"])
        with _exclusive(environment.node_dir):
            _serve(environment, credentials, arguments.address, ready)
    except (MegatronFTError, OSError, *UNREADABLE) as error:
        logging.error("%s", error)
        return 1
    return 0


def _exclusive(directory: Path) -> IO[str]:
    """Hold the folder's lock for as long as this process lives."""
    while True:
        flags = os.O_RDWR | os.O_CREAT
        lock = open(private_files.open_file(directory / LOCK_NAME, flags), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ControlPlaneError(
                f"another SMP already owns {directory}: a job of this name is running, or was "
                "stopped and keeps its snapshots. Run its command again with the same --state-dir "
                "to go on, free it with `megatron-ft clean`, or choose another --job name"
            ) from error
        if _is_at(lock, directory / LOCK_NAME):
            return lock
        # `megatron-ft clean` has removed the file between our open and our lock.
        lock.close()
        private_files.make_folder(directory)


def _is_at(file: IO[str], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _make_folders(node_dir: Path) -> None:
    """The node's folder, and those of all jobs and of this job if this node has none yet."""
    for folder in (node_dir.parent.parent, node_dir.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        private_files.check_parent(folder)
    private_files.make_folder(node_dir)


def _serve(
    environment: ProcessEnvironment, credentials: Credentials, address: str, ready: Path
) -> None:
    def announce(endpoint: str) -> None:
        private_files.replace_file(environment.node_dir / PID_NAME, str(os.getpid()).encode())
        private_files.replace_file(ready, msgspec.json.encode(Ready(os.getpid(), endpoint)))

    asyncio.run(run(environment, credentials, address, announce))


if __name__ == "__main__":
    sys.exit(main())
