"""What a node's kernel and files say: limits, versions, logind, the arena folder."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path

import megatron_ft
from megatron_ft.arena.limits import memory_readings
from megatron_ft.cli.clean import find_jobs, living_process
from megatron_ft.cli.doctor.facts import ArenaPlace, Leftover, MemoryLimit
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.smp.node_folder import make_node_dir

LOGIND_FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")
LINGER = Path("/var/lib/systemd/linger")


def soft_limit(which: int) -> int:
    """A soft resource limit, -1 for none."""
    return _limit(resource.getrlimit(which)[0])


def hard_limit(which: int) -> int:
    """A hard resource limit, -1 for none."""
    return _limit(resource.getrlimit(which)[1])


def machine_id() -> str:
    """The same for all who share a kernel, another after a reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def code_digest(package: Path = Path(megatron_ft.__file__).parent) -> str:
    """A digest of all Python sources of a package, so that two versions of it are told apart."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def remove_ipc(folders: Iterable[str] = LOGIND_FOLDERS) -> bool | None:
    """logind's RemoveIPC, by the files and in the order of logind.conf(5); None without logind.

    A file of the same name in an earlier folder hides later ones; drop-ins beat the main
    file.  The default of systemd itself is yes.
    """
    places = [Path(folder) for folder in folders]
    main = next((p / "logind.conf" for p in places if (p / "logind.conf").is_file()), None)
    dropins: dict[str, Path] = {}
    for place in places:
        for path in place.glob("logind.conf.d/*.conf"):
            dropins.setdefault(path.name, path)
    files = [*([main] if main else []), *(dropins[name] for name in sorted(dropins))]
    if not files:
        return None
    said = [value for path in files for value in _remove_ipc_lines(path)]
    return said[-1].lower() in ("yes", "true", "on", "1") if said else True


def lingers(user: str, folder: Path = LINGER) -> bool:
    """Whether logind keeps a user's things when no session of the user is left."""
    return (folder / user).exists()


def filesystem_of(folder: Path, mounts: str) -> str:
    """The type of the file system that holds ``folder``, by the text of /proc/self/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
        if point and folder.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best[1]


def arena_place(root: Path, node_dir: Path, marker: str) -> ArenaPlace:
    """The folder of a node's arenas, after making it and the marker file in it.

    Only some launchers make the folder before the first process of a node starts.
    """
    try:
        make_node_dir(node_dir)
        path = node_dir / marker
        path.touch(mode=0o600)
        status, space = path.stat(), os.statvfs(node_dir)
        return ArenaPlace(
            folder=str(node_dir),
            filesystem=filesystem_of(node_dir.resolve(), Path("/proc/self/mounts").read_text()),
            total_bytes=space.f_blocks * space.f_frsize,
            limits=tuple(MemoryLimit(*reading) for reading in memory_readings(root)),
            device=status.st_dev,
            inode=status.st_ino,
            leftovers=tuple(leftovers(root, node_dir.parent.name)),
        )
    except (OSError, MegatronFTError) as error:
        return ArenaPlace(folder=str(node_dir), error=str(error))


def leftovers(root: Path, ours: str) -> Iterable[Leftover]:
    """What jobs other than ``ours`` keep below ``root`` on this node."""
    for folder in find_jobs(root):
        try:
            if folder.job != ours:
                found = folder.allocated_bytes(), living_process(folder)
                yield Leftover(folder.job, *found)
        except FileNotFoundError:  # It has just been removed.
            continue


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value


def _remove_ipc_lines(path: Path) -> Iterable[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() == "RemoveIPC" and value.strip():
            yield value.strip()
