"""Free the shared memory of jobs that no longer run: arenas, sockets and state.

A job that has a supervisor is never touched.  With --job, SMPs that keep the snapshots of a
stopped job are ended first, also those whose socket or folder is gone; with --all, such a job is
left alone.  Removed snapshots cannot be restored from any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.cli import common
from megatron_ft.core import private_files, procfs
from megatron_ft.core.environment import JOB, NODE_DIR, SOCKET_NAME
from megatron_ft.core.errors import ConfigError, ControlPlaneError, UntrustedFileError
from megatron_ft.launchers.trainer_host import ROOM
from megatron_ft.rpc.local_query import ask, has_listener
from megatron_ft.rpc.messages import Discard, Ok, Refused
from megatron_ft.smp.node_folder import LOCK_NAME
from megatron_ft.supervisor.job_state import JobState, is_supervised, state_folder

EXIT_CODES = {1: "the job given with --job still runs and was left alone"}

SMP_END_SECONDS = 10.0


@dataclass(frozen=True)
class JobFolder:
    """One job's folder under the root; its subfolders are nodes."""

    path: Path

    @property
    def job(self) -> str:
        return self.path.name

    def nodes(self) -> list[Path]:
        """Folders of the job's nodes on this machine; links are not followed."""
        return _subfolders(self.path)

    def allocated_bytes(self) -> int:
        """Bytes of memory (or disk) that the folder's files occupy."""
        blocks = 0
        for file in (Path(base, f) for base, _, names in os.walk(self.path) for f in names):
            with suppress(FileNotFoundError):  # a job that runs replaces files meanwhile
                blocks += file.lstat().st_blocks
        return blocks * 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--job", help="remove this job only")
    which.add_argument(
        "--all", action="store_true", help="remove every job that no longer runs, skip the others"
    )
    common.add_folders(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")


def main(arguments: argparse.Namespace) -> int:
    root = common.root_of(arguments)
    folders = find_jobs(root)
    if arguments.job is not None:
        folders = [f for f in folders if f.job == arguments.job]
        gone = JobFolder(root / arguments.job)
        if not folders and not arguments.dry_run and end_smps(gone, arguments.state_dir):
            return 0
        if not folders:
            raise ConfigError(
                f"no job {arguments.job!r} under {root}; `megatron-ft clean --all --dry-run` lists "
                "all jobs there"
            )
    # SMPs take their arenas with them.
    sizes = {folder: folder.allocated_bytes() for folder in folders}
    if arguments.job is not None and not arguments.dry_run:
        end_smps(folders[0], arguments.state_dir)
    running = [f for f, size in sizes.items() if not _clean_one(f, size, arguments)]
    if not folders:
        print(f"nothing to clean under {root}")
    return 1 if running and arguments.job is not None else 0


def find_jobs(root: Path) -> list[JobFolder]:
    """Folders of jobs under ``root``, [] if it does not exist.

    ConfigError if ``root`` is a link or others may write to it: /dev/shm is writable to all,
    so a foreign folder by our name may be a trap.
    """
    try:
        private_files.check_folder(root, private_files.OTHERS_WRITE)
    except FileNotFoundError:
        return []
    except UntrustedFileError as error:
        raise ConfigError(f"{error}; or give another --arena-dir") from error
    return [JobFolder(path) for path in _subfolders(root)]


def end_smps(folder: JobFolder, state_dir: Path | None) -> int:
    """End the SMPs of a job that no supervisor leads; how many had to be killed.

    Each is asked; one that has a supervisor refuses.  SMPs whose socket or folder was removed
    cannot be asked: they are killed if nothing else of the job runs, and no supervisor holds the
    job's state.
    """
    ending = False
    for node in folder.nodes():
        with suppress(ControlPlaneError, UntrustedFileError, OSError):
            answer = ask(node / SOCKET_NAME, Discard())
            ending |= isinstance(answer, Ok)
            if isinstance(answer, Refused):
                print(f"{folder.job}: node {node.name}: {answer.reason}", file=sys.stderr)
    deadline = time.monotonic() + SMP_END_SECONDS * ending
    while any(map(_is_smp, members(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = members(folder)
    if not left or not all(map(_is_orphan, left)) or is_supervised(folder.job, state_dir):
        return 0
    procfs.kill_matching(lambda pid: pid in left and _is_orphan(pid), f"job {folder.job}")
    print(f"{folder.job}: ended {len(left)} SMPs whose socket is gone")
    return len(left)


def _is_smp(pid: int) -> bool:
    with suppress(OSError):
        return b"megatron_ft.smp" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _is_orphan(pid: int) -> bool:
    node_dir = procfs.read_environment(pid).get(NODE_DIR, "")
    with suppress(OSError, UntrustedFileError):
        return _is_smp(pid) and not has_listener(Path(node_dir) / SOCKET_NAME)
    return False


def _subfolders(folder: Path) -> list[Path]:
    """Folders in ``folder``; none if a job that ends has removed it meanwhile."""
    try:
        entries = [e for e in os.scandir(folder) if not e.name.startswith(".")]
    except FileNotFoundError:
        return []
    return sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))


def _clean_one(folder: JobFolder, size: int, arguments: argparse.Namespace) -> bool:
    """Remove one job of ``size`` bytes unless it runs; True if it is gone (or would be)."""
    mebibytes = size / (1 << 20)
    with locked(folder) as free:
        # By their environment: the kernel gives numbers in files out again.
        left = members(folder)
        if not free or left:
            held = "an SMP or supervisor holds its lock"
            reason = held if not free else f"process {min(left)}"
            text = f"{folder.job}: still runs ({reason}), left alone"
            if all(map(_is_smp, left)):
                text += f"; SMPs of a stopped job end with `megatron-ft clean --job {folder.job}`"
            print(text, file=sys.stderr)
            return False
        if not arguments.dry_run:
            # A supervisor that was killed has left them, without trainers.
            procfs.kill_matching(
                lambda pid: (
                    ROOM in (marks := procfs.read_environment(pid)) and _belongs(marks, folder)
                ),
                f"hosts of {folder.job}",
            )
            shutil.rmtree(folder.path)
            # Without arenas the supervisor's notes would only mislead the next one.
            notes = state_folder(folder.job, arguments.state_dir)
            if notes.is_dir():
                JobState(notes, folder.job).remove()
    print(f"{folder.job}: {'would remove' if arguments.dry_run else 'removed'} {mebibytes:.1f} MiB")
    return True


@contextmanager
def locked(folder: JobFolder) -> Iterator[bool]:
    """Hold every lock file of the job; False if somebody else holds one.

    A lock shows a living SMP also when it runs in a container with its own process ids.  Holding
    them until the folder is gone keeps an SMP that starts meanwhile from adopting half of it.
    """
    locks = {n / LOCK_NAME for n in folder.nodes()}
    locks |= {*folder.path.glob("*.lock"), *folder.path.glob("*/*.lock")}
    with ExitStack() as held:
        for path in sorted(locks):
            descriptor = _open_lock(path)
            if descriptor is None:
                continue
            held.callback(os.close, descriptor)
            if not private_files.try_lock(descriptor):
                yield False
                return
        yield True


def _open_lock(path: Path) -> int | None:
    # Not created if missing: a dry run changes nothing, and without a lock no SMP was there.
    try:
        return private_files.open_file(path, os.O_RDWR, forbidden=private_files.OTHERS_WRITE)
    except FileNotFoundError:
        return None


def members(folder: JobFolder) -> set[int]:
    """Processes of a job, but for its trainer hosts."""
    return {
        pid
        for pid in procfs.own_processes()
        if _belongs(marks := procfs.read_environment(pid), folder) and ROOM not in marks
    }


def _belongs(marks: Mapping[str, str], folder: JobFolder) -> bool:
    """True with the job's name, or the folder of one of its nodes, in the environment."""
    inside = f"{folder.path.absolute()}/"
    return marks.get(JOB) == folder.job or marks.get(NODE_DIR, "").startswith(inside)
