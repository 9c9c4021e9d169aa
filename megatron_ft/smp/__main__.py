"""The SMP process: ``python -m megatron_ft.smp --address ADDRESS`` with credentials on stdin."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.core import private_files
from megatron_ft.core.environment import NODE_DIR, READY_NAME, ProcessEnvironment
from megatron_ft.core.errors import UNREADABLE, ControlPlaneError, MegatronFTError
from megatron_ft.rpc.sockets import JobKeys, Server
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.node_folder import is_at, lock_folder, make_node_dir, write_pid
from megatron_ft.smp.scrub import Scrub
from megatron_ft.smp.service import SmpService

log = logging.getLogger(__name__)

READY_SPARE = ".ready"
"""Space in the node's folder for the file by which the next SMP announces itself."""

FOLDER_CHECK_SECONDS = 1.0


class Credentials(msgspec.Struct, frozen=True):
    """Content of an SMP's standard input: never an argument, never a variable."""

    job: str
    secret: bytes


class Ready(msgspec.Struct, frozen=True):
    """Content of the file by which an SMP announces that it serves, and where."""

    pid: int
    endpoint: str


def main() -> int:
    """Run until retired.  Exit codes: 0 retired, 1 refused (the log says why)."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.smp", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1", help="address that other nodes reach")
    parser.add_argument(
        "--ready", type=Path, help="file to announce itself in (default: in the node's folder)"
    )
    arguments = parser.parse_args()
    # A scheduler's warning to all of a job must not end the memory before it was drained.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        credentials = msgspec.json.decode(sys.stdin.buffer.read(), type=Credentials)
        environment = ProcessEnvironment.from_env()
        ready = arguments.ready or environment.node_dir / READY_NAME
        make_node_dir(environment.node_dir)
        with lock_folder(environment.node_dir, credentials.job) as lock:
            asyncio.run(serve(environment, credentials, arguments.address, ready, lock))
    except (MegatronFTError, OSError, *UNREADABLE) as error:
        logging.error("the SMP of %s ends: %s", os.environ.get(NODE_DIR), error)
        return 1
    return 0


async def serve(
    environment: ProcessEnvironment,
    credentials: Credentials,
    address: str,
    ready: Path,
    lock: BinaryIO,
) -> None:
    """Adopt the contents of the node's folder and serve until the job retires this SMP.

    ``ready`` announces that it serves; ``lock`` is that of the folder.
    """
    keys = JobKeys.derive(credentials.secret)
    with ExitStack() as at_end:
        context = zmq.asyncio.Context()
        at_end.callback(context.term)
        local_socket = Server(context)
        at_end.callback(local_socket.socket.close)
        control_socket = Server(context, numbered=True, linger_ms=1000)
        at_end.callback(control_socket.socket.close)
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        at_end.callback(authenticator.stop)
        authenticator.configure_curve_callback("*", credentials_provider=keys)
        senders = (local_socket.send, control_socket.send)
        service = SmpService(environment, uuid.UUID(credentials.job), *senders)
        service.adopt()
        local = LocalServer(service, local_socket)
        control = ControlServer(service, control_socket)
        scrub = Scrub(service)
        at_end.callback(scrub.close)
        endpoint = keys.listen(control_socket.socket, address)
        write_pid(environment.node_dir)
        _write_ready(environment.node_dir / READY_SPARE, ready, endpoint)
        loops = (local.serve(), control.serve(), service.watch_lease(), scrub.run())
        await _until(service.retired, *loops, _require_in_place(service, local, lock))
        if service.failure is not None:
            raise service.failure


async def _until(event: asyncio.Event, *loops: Coroutine[Any, Any, Any]) -> None:
    """Run endless loops until the event; if one of them fails, its exception is raised."""
    tasks = [asyncio.ensure_future(loop) for loop in (event.wait(), *loops)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


async def _require_in_place(service: SmpService, local: LocalServer, lock: BinaryIO) -> None:
    """ControlPlaneError once the folder or its socket was removed: nobody could reach this SMP.

    Its writers are killed before, as the next SMP would not know of them.
    """
    folder = service.environment.node_dir
    while service.retiring or (is_at(lock, folder) and local.in_place()):
        await asyncio.sleep(FOLDER_CHECK_SECONDS)
    await service.kill_writers(service.writers.all())
    raise ControlPlaneError(f"{folder}, or its socket, was removed: this SMP ends")


def _write_ready(reserved: Path, ready: Path, endpoint: str) -> None:
    """Write into space that an earlier SMP of this node reserved: the tmpfs may be full by now."""
    private_files.rewrite_file(reserved, msgspec.json.encode(Ready(os.getpid(), endpoint)))
    try:
        reserved.rename(ready)
    except OSError:  # another file system
        private_files.replace_file(ready, reserved.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
