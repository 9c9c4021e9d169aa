"""Start an SMP: ``python -m megatron_ft.smp --address ADDRESS`` with credentials on stdin."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import sys
from pathlib import Path
from typing import IO

import msgspec

from megatron_ft.environment import ProcessEnvironment
from megatron_ft.errors import ControlPlaneError, MegatronFTError
from megatron_ft.smp.daemon import Credentials, run

LOCK_NAME = "smp.lock"
READY_NAME = "smp.json"
PID_NAME = "smp.pid"


class Ready(msgspec.Struct, frozen=True):
    """Content of the file that says that an SMP serves, and where."""

    pid: int
    endpoint: str


def main() -> int:
    """Run until retired.  Exit codes: 0 retired, 1 refused (the log says why)."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.smp", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1", help="address that other nodes reach")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        credentials = msgspec.json.decode(sys.stdin.buffer.read(), type=Credentials)
        environment = ProcessEnvironment.from_env()
        environment.node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _exclusive(environment.node_dir):
            _serve(environment, credentials, arguments.address)
    except (MegatronFTError, msgspec.MsgspecError) as error:
        logging.error("%s", error)
        return 1
    return 0


def _exclusive(directory: Path) -> IO[str]:
    """Hold the folder's lock for as long as this process lives."""
    while True:
        lock = open(directory / LOCK_NAME, "w")
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
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _is_at(file: IO[str], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _serve(environment: ProcessEnvironment, credentials: Credentials, address: str) -> None:
    def announce(endpoint: str) -> None:
        _replace(environment.node_dir / PID_NAME, str(os.getpid()).encode())
        ready = Ready(os.getpid(), endpoint)
        _replace(environment.node_dir / READY_NAME, msgspec.json.encode(ready))

    asyncio.run(run(environment, credentials, address, announce))


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
