"""The SMP process: ``python -m megatron_ft.smp --address ADDRESS`` with credentials on stdin."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_ft.arena.limits import format_bytes
from megatron_ft.core import private_files
from megatron_ft.core.environment import NODE_DIR, READY_NAME, ProcessEnvironment
from megatron_ft.core.errors import UNREADABLE, MegatronFTError
from megatron_ft.rpc.sockets import JobKeys, Server
from megatron_ft.smp.control_server import ControlServer
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.node_folder import NodeFolder, write_pid
from megatron_ft.smp.scrub import Scrub
from megatron_ft.smp.service import SmpService

log = logging.getLogger(__name__)

READY_SPARE = ".ready"
"""Space in the node's folder for the file by which the next SMP announces itself."""

NOTES_BYTES = 64 << 10
"""Room for the small files of a node, and their successors; each takes a page at least."""

FOLDER_CHECK_SECONDS = 1.0


class Credentials(msgspec.Struct, frozen=True):
    """Content of an SMP's standard input: never an argument, never a variable.

    ``status_file`` is where the supervisor keeps its view of the job, for those who ask the SMP.
    """

    job: str
    secret: bytes
    status_file: str = ""


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
    # Once it serves it asks for an evacuation instead.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        credentials = msgspec.json.decode(sys.stdin.buffer.read(), type=Credentials)
        environment = ProcessEnvironment.from_env()
        ready = arguments.ready or environment.node_dir / READY_NAME
        folder = NodeFolder(environment.node_dir, credentials.job)
        folder.acquire()

        def announce(endpoint: str) -> None:
            write_pid(environment.node_dir)
            _write_ready(environment.node_dir / READY_SPARE, ready, endpoint)

        with closing(folder):
            asyncio.run(serve(environment, credentials, arguments.address, announce, folder))
    except (MegatronFTError, OSError, *UNREADABLE) as error:
        logging.error("%s", _if_full(error) or error)
        return 1
    return 0


async def serve(
    environment: ProcessEnvironment,
    credentials: Credentials,
    address: str,
    announce: Callable[[str], None],
    folder: NodeFolder,
) -> None:
    """Adopt the contents of the node's folder and serve until the job retires this SMP.

    ``announce`` gets the endpoint of the control plane once it is served; ``folder`` is locked.
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
        local = LocalServer(service, local_socket, credentials.status_file)
        keeper = FolderKeeper(service, local, folder)
        control = ControlServer(service, control_socket, keeper.check)
        scrub = Scrub(service)
        at_end.callback(scrub.close)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, service.terminated)
        announce(keys.listen(control_socket.socket, address))
        loops = (local.serve(), control.serve(), service.watch_lease(), scrub.run(), keeper.run())
        await _until(service.retired, *loops)
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


class FolderKeeper:
    """Makes the folder, lock, files and socket of a living SMP again if they were removed.

    Only the SMP knows the writers to its arenas and the state of the job, so it stays.  Arenas
    whose files are gone cannot come back: the next admission counts them as lost.
    """

    def __init__(self, service: SmpService, local: LocalServer, folder: NodeFolder) -> None:
        self._service, self._local, self._folder = service, local, folder

    async def run(self) -> None:
        """Check until cancelled.  Where nothing can be made this SMP ends, and is replaced."""
        while True:
            await asyncio.sleep(FOLDER_CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Make again what is missing, unless this SMP is about to end."""
        if self._service.retiring:
            return
        in_place = self._folder.in_place()
        if not in_place:
            log.error("%s was removed: it is made again", self._folder.directory)
            self._folder.acquire(send_away=False)
            self._service.state.save(self._folder.directory)
            self._service.writers.save()
            write_pid(self._folder.directory)
        if not in_place or not self._local.in_place():
            log.error("the socket in %s was removed: it is made again", self._folder.directory)
            self._local.bind_again()


def _if_full(error: BaseException) -> str:
    """The cause of an error and the way out, if the node's folder had no room for a small file."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    folder = Path(os.environ[NODE_DIR])
    while not folder.is_dir():
        folder = folder.parent
    space = os.statvfs(folder)
    return (
        f"{folder} is full: a node needs, besides its arenas, {format_bytes(NOTES_BYTES)} for its "
        f"notes there, and {format_bytes(space.f_bavail * space.f_frsize)} of "
        f"{format_bytes(space.f_blocks * space.f_frsize)} are free, with {space.f_favail} files; "
        "free some, enlarge the file system, or give another --arena-dir"
    )


def _write_ready(reserved: Path, ready: Path, endpoint: str) -> None:
    """Write into space that an earlier SMP of this node reserved: the tmpfs may be full by now."""
    private_files.rewrite_file(reserved, msgspec.json.encode(Ready(os.getpid(), endpoint)))
    try:
        reserved.rename(ready)
    except OSError:  # another file system
        private_files.replace_file(ready, reserved.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
