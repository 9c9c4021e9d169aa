"""One node examines itself: ``python -m megatron_ft.cli.doctor.probe``, a ProbeRequest on stdin.

It is started as an SMP is: without torch, in a session of its own, with the node's folder
in its environment.  It prints one NodeFacts: what its kernel and files say, how fast it copies,
encodes and writes, and whether its folders are those that the doctor sees.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import pwd
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

import megatron_ft
from megatron_ft.arena.limits import memory_readings
from megatron_ft.arena.mapping import Mapping, allocate
from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.cli.clean import find_jobs, living_process
from megatron_ft.cli.doctor.as_trainer import PACKAGES, versions
from megatron_ft.cli.doctor.facts import (
    ArenaPlace,
    DrainPlace,
    ExportPlace,
    Leftover,
    NodeFacts,
    ProbeRequest,
    Rates,
    say,
)
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.isal import Bytes
from megatron_ft.core.private_files import OTHERS_WRITE, reason_against
from megatron_ft.core.procfs import pid_namespace
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.codec import open_codec
from megatron_ft.smp.node_folder import make_node_dir

REPEATS = 5
LOGIND_FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")
LINGER = Path("/var/lib/systemd/linger")


def examine(request: ProbeRequest, where: ProcessEnvironment, began: float) -> NodeFacts:
    """All facts of this node.  Files that it makes are named by the request's token."""
    arena = arena_place(Path(request.arena_root), where.node_dir, request.token)
    scheme = Scheme.parse(request.scheme)
    rates = measure_rates(where.node_dir, request.token, scheme, request.rate_bytes)
    drain = None
    if request.drain_dir:
        folder = Path(request.drain_dir)
        drain = measure_drain(folder, request.token, where.node, request.rate_bytes)
    return NodeFacts(
        machine=machine_id(),
        host=platform.node(),
        user=os.geteuid(),
        python=platform.python_version(),
        packages=versions(PACKAGES),
        code=code_digest(),
        cpus=len(os.sched_getaffinity(0)),
        began=began,
        ended=time.time(),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        descriptors_hard=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        remove_ipc=remove_ipc(),
        lingers=lingers(_user_name()),
        cgroup=Path("/proc/self/cgroup").read_text(),
        arena=arena,
        rates=rates,
        drain=drain,
        pid_namespace=pid_namespace(),
        exports={
            folder: try_folder(Path(folder), request.token, where.node)
            for folder in request.export_dirs
        },
    )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # A container may run under a number that has no name.
        return str(os.geteuid())


def machine_id() -> str:
    """Id of the kernel: equal for nodes that share one, another after a reboot."""
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
    """True if logind keeps a user's things when no session of the user is left."""
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
            limits=tuple(memory_readings(root)),
            device=status.st_dev,
            inode=status.st_ino,
            leftovers=tuple(leftovers(root, node_dir.parent.name)),
        )
    except (OSError, MegatronFTError) as error:
        return ArenaPlace(folder=str(node_dir), error=str(error))


def leftovers(root: Path, ours: str) -> Iterable[Leftover]:
    """Folders of jobs other than ``ours`` below ``root`` on this node."""
    for folder in find_jobs(root):
        try:
            if folder.job != ours:
                found = folder.allocated_bytes(), living_process(folder)
                yield Leftover(folder.job, *found)
        except FileNotFoundError:  # It has just been removed.
            continue


def _remove_ipc_lines(path: Path) -> Iterable[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() == "RemoveIPC" and value.strip():
            yield value.strip()


def measure_rates(node_dir: Path, token: str, scheme: Scheme, size: int) -> Rates:
    """Rates over ``size`` bytes, each the best of a few; what failed is 0 and said."""
    source = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
    target = np.zeros_like(source)
    memory = size / _best(lambda: np.copyto(target, source))
    try:
        arena = _arena_rate(node_dir / f"{token}.rate", source)
        return Rates(memory, arena, _encode_rate(scheme, source))
    except (OSError, MegatronFTError) as error:
        return Rates(memory, error=str(error))


def measure_drain(folder: Path, token: str, node: str, size: int) -> DrainPlace:
    """Write and sync a file in the drain folder, and read the token that the doctor left there.

    A small file named by token and node, with the token in it, stays for the doctor to find.
    """
    try:
        read = (folder / token).read_text() if (folder / token).exists() else ""
        if reason := _distrust(folder / f"{token}.{node}.checkpoint"):
            return DrainPlace(error=f"a checkpoint that is made there {reason}")
        rate = _write_rate(folder / f"{token}.{node}.rate", size)
        (folder / f"{token}.{node}").write_text(token)
        space = os.statvfs(folder)
        return DrainPlace(rate, read, space.f_bavail * space.f_frsize)
    except OSError as error:
        # Without the file's name, so that nodes that fail alike are one line of the report.
        return DrainPlace(error=error.strerror or str(error))


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


def _arena_rate(path: Path, source: Bytes) -> float:
    """Copies into memory like an arena's, whose pages are there as in the second snapshot."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        allocate(descriptor, source.nbytes)
        os.posix_fallocate(descriptor, 0, source.nbytes)
        mapping = Mapping(descriptor, 0, source.nbytes, writable=True, name=str(path))
        target = mapping.view(np.uint8, 0, source.nbytes)
        return source.nbytes / _best(lambda: np.copyto(target, source))
    finally:
        os.close(descriptor)
        path.unlink()


def _encode_rate(scheme: Scheme, source: Bytes) -> float:
    """Bytes of data a second through one core; 0 without parity."""
    data, parity = scheme.data_members, scheme.parity_members
    if not parity:
        return 0.0
    kernel = open_codec(scheme.kind, data, parity).encode_kernel()
    length = source.nbytes // data
    sources = [source[i * length : (i + 1) * length] for i in range(data)]
    outputs = [np.empty(length, np.uint8) for _ in range(parity)]
    return data * length / _best(lambda: kernel(sources, outputs))


def _write_rate(path: Path, size: int) -> float:
    content = os.urandom(1 << 20)  # Not zeros, which some file systems do not store.
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(max(1, size >> 20)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return max(1, size >> 20) * len(content) / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)


def _best(work: Callable[[], None]) -> float:
    """Seconds of the fastest of several runs, the first of which may still fault pages in."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


def try_folder(folder: Path, token: str, node: str) -> ExportPlace:
    """Write to one on this node, and look at the file that ``export_folders`` has left there."""
    locked, own = folder / f"{token}.lock", folder / f"{token}.{node}.export"
    try:
        own.write_text(token)
        own.unlink()
        same = locked.exists() and locked.read_text() == token
    except OSError as error:
        # Without the file's name, so that nodes that fail alike are one line of the report.
        return ExportPlace(error=error.strerror or str(error))
    try:
        if same:
            with locked.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ExportPlace(same, locked=True)
    except OSError as error:
        return ExportPlace(same, problem=error.strerror or str(error))
    return ExportPlace(same)


def main() -> None:
    """Read the request, look, answer."""
    began = time.time()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    say(examine(request, ProcessEnvironment.from_env(), began))


if __name__ == "__main__":
    main()
