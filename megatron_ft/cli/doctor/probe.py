"""One node examines itself: ``python -m megatron_ft.cli.doctor.probe``, a ProbeRequest on stdin.

It is started as an SMP is: without torch, in a session of its own, with the node's folder
in its environment.  It prints one NodeFacts: what its kernel and its files say, and whether its
folders are those that the doctor sees.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import megatron_ft
from megatron_ft.arena.limits import memory_readings
from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.cli.doctor.facts import ArenaPlace, NodeFacts, ProbeRequest, SharedFolder, say
from megatron_ft.core import copy_crc
from megatron_ft.core.cores import shared_cores
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.private_files import OTHERS_WRITE, make_node_folder, reason_against
from megatron_ft.core.procfs import machine, pid_namespace

LOGIND = ("systemd-analyze", "cat-config", "systemd/logind.conf")
LINGER = Path("/var/lib/systemd/linger")
LAST_SYSTEM_USER = 999
"""systemd counts users up to this number as the system's, and never removes what is theirs."""


def examine(request: ProbeRequest, where: ProcessEnvironment) -> NodeFacts:
    """All facts of this node.  Files that it makes are named by the request's token."""
    return NodeFacts(
        machine=machine(),
        user=os.geteuid(),
        code=code_digest(),
        cgroup=Path("/proc/self/cgroup").read_text(),
        removes_ipc=removes_ipc(os.geteuid()),
        arena=arena_place(Path(request.arena_root), where.node_dir, request.token),
        pid_namespace=pid_namespace(),
        copies=copy_crc.describe(),
        copies_advice=copy_crc.advice(),
        cores=shared_cores(),
        folders={
            folder: shared_folder(Path(folder), request.token, where.node)
            for folder in request.folders
        },
    )


def code_digest(package: Path = Path(megatron_ft.__file__).parent) -> str:
    """A digest of all Python sources of a package, so that two versions of it are told apart."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def removes_ipc(user: int, command: Sequence[str] = LOGIND, linger: Path = LINGER) -> bool:
    """True if logind removes the user's files in /dev/shm when the last session ends.

    It does so by default.  It spares system users and those who linger; see logind.conf(5).
    """
    if user <= LAST_SYSTEM_USER:
        return False
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        lingers = (linger / pwd.getpwuid(user).pw_name).exists()
    except (OSError, KeyError, subprocess.TimeoutExpired):  # no systemd, or a number without name
        return False
    pairs = [line.partition("=") for line in shown.stdout.splitlines()]
    given = [value.strip() for name, _, value in pairs if name.strip() == "RemoveIPC"]
    removes = not given or given[-1].lower() in ("yes", "true", "on", "1")
    return bool(shown.stdout) and removes and not lingers


def arena_place(root: Path, node_dir: Path, marker: str) -> ArenaPlace:
    """The folder of a node's arenas, after making it and the marker file in it.

    Only some launchers make the folder before the first process of a node starts.
    """
    try:
        make_node_folder(node_dir)
        path = node_dir / marker
        path.touch(mode=0o600)
        status, space = path.stat(), os.statvfs(node_dir)
        return ArenaPlace(
            folder=str(node_dir),
            filesystem=filesystem_of(node_dir.resolve(), Path("/proc/self/mounts").read_text()),
            total_bytes=space.f_blocks * space.f_frsize,
            limits=tuple(memory_readings(root)),
            device=status.st_dev,
            inode=status.st_ino,
        )
    except (OSError, MegatronFTError) as error:
        return ArenaPlace(folder=str(node_dir), error=str(error))


def filesystem_of(folder: Path, mounts: str) -> str:
    """The type of the file system that holds ``folder``, by the text of /proc/self/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
        if point and folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best[1]


def shared_folder(folder: Path, token: str, node: str) -> SharedFolder:
    """Look for the file that the doctor left there, and leave one for the doctor to find."""
    try:
        same = (folder / token).exists()
        distrust = _distrust(folder / f"{token}.{node}.checkpoint")
        (folder / f"{token}.{node}").touch()
        space = os.statvfs(folder)
        return SharedFolder(same, space.f_bavail * space.f_frsize, distrust)
    except OSError as error:
        # Without the file's name, so that nodes that fail alike are one line of the report.
        return SharedFolder(error=error.strerror or str(error))


def _distrust(folder: Path) -> str:
    """Reason why the job would refuse its own drain, or "": some file systems give new files to
    another user (NFS with root_squash), or to everybody (CIFS, vfat)."""
    disk, file = DiskCalls(), folder / "shard"
    disk.make_folder(folder)
    try:
        disk.write_file(file, [b"shard"])
        return reason_against(folder.stat(), stat.S_ISDIR, stat.S_IWOTH) or reason_against(
            file.stat(), forbidden=OTHERS_WRITE, links=True
        )
    finally:
        file.unlink(missing_ok=True)
        folder.rmdir()


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    say(examine(request, ProcessEnvironment.from_env()))


if __name__ == "__main__":
    main()
