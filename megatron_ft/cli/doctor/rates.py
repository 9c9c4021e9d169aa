"""How fast a node copies into its arenas, encodes, and writes to the drain folder."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_ft.arena.mapping import Mapping, allocate
from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.cli.doctor.facts import DrainPlace, Rates
from megatron_ft.core.errors import MegatronFTError
from megatron_ft.core.isal import Bytes
from megatron_ft.core.private_files import OTHERS_WRITE, reason_against
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.codec import open_codec

REPEATS = 5


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
    """Why the job would refuse what it has drained itself: some file systems give what is made to
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
    kernel = open_codec(scheme.kind, data, parity).kernel(
        range(data, data + parity), range(data)
    )  # fmt: skip
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
