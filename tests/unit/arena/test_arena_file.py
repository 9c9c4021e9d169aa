"""Arena files: creation, adoption, views, and everything that can be wrong with a file."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.arena import mapping as huge_pages
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Geometry, Permit, SlotHeader
from megatron_ft.arena.mapping import Mapping
from megatron_ft.core.errors import (
    ArenaCorruptError,
    ArenaError,
    ArenaForeignError,
    ArenaMemoryError,
    ArenaTruncatedError,
    ArenaVersionError,
)
from megatron_ft.core.identity import Ancestor, SnapshotId
from tests.support.arena_samples import JOB, SHARD, make_header, make_slot
from tests.support.tmpfs import mount_tmpfs

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, foreign owners")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a tmpfs, where arenas live."""
    with tempfile.TemporaryDirectory(prefix="arena-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def path(folder: Path) -> Path:
    made = folder / f"{SHARD}.arena"
    Arena.create(made, make_header()).close()
    return made


def patch(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_new_arena_is_empty_private_and_allocated(folder: Path) -> None:
    path = folder / "uid" / "job" / "node" / "a.arena"
    with Arena.create(path, make_header()) as arena:
        info = path.stat()
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_size == arena.geometry.file_bytes
        assert info.st_blocks * 512 >= info.st_size
        for parent in (path.parent, path.parent.parent, path.parent.parent.parent):
            assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        assert arena.header == make_header()
        assert [arena.slot(i) for i in range(2)] == [SlotHeader(), SlotHeader()]
        assert (arena.permit(), arena.progress()) == (None, -1)
        for slot in range(2):
            assert not arena.data(slot).any() and not arena.parity(slot).any()
            assert not arena.parity_digests(slot).any()
    assert os.listdir(path.parent) == ["a.arena"]


def test_what_one_process_writes_another_reads(path: Path) -> None:
    with Arena.open(path, job=JOB) as writer, Arena.open(path) as reader:
        header = make_header(
            incarnation=8, lineage=(*make_header().lineage, Ancestor(8, SnapshotId(7, 1)))
        )
        writer.write_header(header)
        assert reader.header == header
        writer.write_slot(1, make_slot())
        assert (reader.slot(0), reader.slot(1)) == (SlotHeader(), make_slot())
        for permit in (Permit(SnapshotId(7, 5), 10, 1), None):
            writer.write_permit(permit)
            assert reader.permit() == permit
        writer.write_progress(41)
        assert reader.progress() == 41
        for slot in range(2):
            for name in ("data", "parity", "parity_digests"):
                getattr(writer, name)(slot, writable=True)[:] = 3 + slot
                assert (getattr(reader, name)(slot) == 3 + slot).all()


@pytest.mark.parametrize(
    "change",
    [
        {"job": uuid.UUID(int=5)},
        {"geometry": Geometry(1, 12288, 6144, 1024)},
        {"shard_id": "pp0-tp1-dp2-ep0", "member_index": 0},
    ],
)
def test_what_must_not_change_does_not(path: Path, change: dict[str, object]) -> None:
    with Arena.open(path) as arena:
        with pytest.raises(ValueError, match="cannot change"):
            arena.write_header(make_header(**change))
        assert arena.header == make_header()


def test_a_permit_for_a_slot_that_does_not_exist_counts_as_absent(path: Path) -> None:
    with Arena.open(path) as arena:
        arena.write_permit(Permit(SnapshotId(7, 5), 10, 2))
        assert arena.permit() is None


def test_an_arena_without_parity_has_empty_parity(folder: Path) -> None:
    header = make_header(
        codec="none", data_members=1, parity_members=0, members=(SHARD,),
        member_index=0, geometry=Geometry(3, 4096, 0, 1024),
    )  # fmt: skip
    with Arena.create(folder / "a.arena", header) as arena:
        assert arena.parity(2, writable=True).size == 0
        assert arena.parity_digests(2).size == 0
        assert arena.data(2).size == 4096


def test_an_existing_arena_is_not_overwritten_by_accident(path: Path) -> None:
    with Arena.open(path) as arena:
        arena.write_progress(7)
    with pytest.raises(ArenaError, match="only copy"):
        Arena.create(path, make_header())
    with Arena.open(path) as arena:
        assert arena.progress() == 7
    Arena.create(path, make_header(), replace=True).close()
    with Arena.open(path) as arena:
        assert arena.progress() == -1
    assert os.listdir(path.parent) == [path.name]


def test_a_stale_temporary_file_is_replaced(folder: Path) -> None:
    path = folder / "a.arena"
    stale = folder / "a.arena.tmp"
    stale.write_bytes(bytes(100))
    Arena.create(path, make_header()).close()
    assert os.listdir(folder) == ["a.arena"]
    stale.symlink_to(folder / "elsewhere")
    Arena.create(path, make_header(), replace=True).close()
    assert os.listdir(folder) == ["a.arena"]


# Everything that can be wrong with a file.


def test_a_missing_file_is_an_arena_error(folder: Path) -> None:
    with pytest.raises(ArenaError, match="No such file"):
        Arena.open(folder / "a.arena")


def test_another_jobs_arena_is_foreign(path: Path) -> None:
    with pytest.raises(ArenaForeignError, match="belongs to job"):
        Arena.open(path, job=uuid.UUID(int=1))


@needs_root
def test_another_users_arena_is_foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)
    with pytest.raises(ArenaForeignError, match="user 12345"):
        Arena.open(path)


@needs_root
def test_another_users_folder_is_foreign(folder: Path) -> None:
    squatted = folder / "uid"
    squatted.mkdir()
    os.chown(squatted, 12345, 12345)
    for path in (squatted / "a.arena", squatted / "job" / "node" / "a.arena"):
        with pytest.raises(ArenaForeignError, match="user 12345"):
            Arena.create(path, make_header())
    assert os.listdir(squatted) == []


def test_an_arena_that_others_may_write_is_foreign(path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(ArenaForeignError, match="mode 666"):
        Arena.open(path)


def test_a_link_a_pipe_and_a_folder_are_no_arenas(path: Path) -> None:
    (path.parent / "link").symlink_to(path)
    os.mkfifo(path.parent / "pipe")
    (path.parent / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(ArenaForeignError):
            Arena.open(path.parent / name)


def test_another_version_is_named(path: Path) -> None:
    patch(path, 12, bytes([4, 0, 0, 0]))
    with pytest.raises(ArenaVersionError, match="format version 4"):
        Arena.open(path)


def test_another_byte_order_is_named(path: Path) -> None:
    patch(path, 8, bytes([0x0A, 0x0B, 0x0C, 0x0D]))
    with pytest.raises(ArenaVersionError, match="big-endian"):
        Arena.open(path)


@pytest.mark.parametrize(("offset", "raw"), [(0, b"NOTARENA"), (8, b"\0\0\0\0")])
def test_no_arena_is_corrupt(path: Path, offset: int, raw: bytes) -> None:
    patch(path, offset, raw)
    with pytest.raises(ArenaCorruptError):
        Arena.open(path)


def test_a_truncated_file_is_refused_at_any_length(path: Path) -> None:
    length = path.stat().st_size
    for size in (length - 1, length - 4096, 98304, 32768, 20480, 12288, 5000, 4096, 16, 15, 0):
        os.truncate(path, size)
        with pytest.raises(ArenaTruncatedError):
            Arena.open(path)


def test_bytes_behind_the_end_do_no_harm(path: Path) -> None:
    """Encoders that start anew open the arena again, and parity must not end for such a thing."""
    os.truncate(path, path.stat().st_size + 4096)
    with Arena.open(path) as arena:
        assert arena.geometry.file_bytes + 4096 == path.stat().st_size


def test_one_damaged_header_copy_is_nothing_and_two_are_corrupt(path: Path) -> None:
    patch(path, 4096 + 40, b"XX")
    with Arena.open(path) as arena:
        assert arena.header == make_header()
    patch(path, 4096 + 8192 + 40, b"XX")
    with pytest.raises(ArenaCorruptError, match="both copies of the arena header"):
        Arena.open(path)


def test_two_damaged_copies_of_each_record(path: Path) -> None:
    with Arena.open(path) as arena:
        arena.write_permit(Permit(SnapshotId(7, 5), 10, 1))
        arena.write_progress(5)
        for record in (4096, 20480, 24576, 32768):
            copy = {4096: 8192, 32768: 16384}.get(record, 2048)
            for at in (record, record + copy):
                patch(path, at + 32, b"\xff\xff\xff")
        assert (arena.permit(), arena.progress()) == (None, -1)
        with pytest.raises(ArenaCorruptError, match="slot 0"):
            arena.slot(0)
        with pytest.raises(ArenaCorruptError, match="arena header"):
            arena.header  # noqa: B018
        assert arena.slot(1) == SlotHeader()


def test_geometry_that_changes_under_an_open_arena_is_corrupt(path: Path, folder: Path) -> None:
    other = folder / "other.arena"
    larger = dataclasses.replace(make_header(), geometry=Geometry(3, 12288, 6144, 1024))
    Arena.create(other, larger).close()
    with Arena.open(path) as arena:
        patch(path, 4096, other.read_bytes()[4096:20480])
        with pytest.raises(ArenaCorruptError, match="geometry"):
            arena.header  # noqa: B018


def test_holes_of_a_sparse_copy_are_filled_before_anything_touches_them(path: Path) -> None:
    sparse = path.with_name("sparse.arena")
    with sparse.open("wb") as file:
        file.write(path.read_bytes()[:32768])
        file.truncate(path.stat().st_size)
    sparse.chmod(0o600)
    assert sparse.stat().st_blocks * 512 < sparse.stat().st_size
    Arena.open(sparse).close()
    assert sparse.stat().st_blocks * 512 >= sparse.stat().st_size


# Memory.


@pytest.fixture
def small_tmpfs(folder: Path) -> Iterator[Path]:
    yield from mount_tmpfs(folder / "small", "size=4m,mode=0700")


@pytest.fixture
def huge_tmpfs(folder: Path) -> Iterator[Path]:
    yield from mount_tmpfs(folder / "huge", "size=64m,mode=0700,huge=always")


def test_a_tmpfs_that_is_too_small_is_refused_with_the_arithmetic(small_tmpfs: Path) -> None:
    header = make_header(geometry=Geometry(2, 2 << 20, 1 << 20, 1 << 20))
    with pytest.raises(ArenaMemoryError) as caught:
        Arena.create(small_tmpfs / "a.arena", header)
    message = str(caught.value)
    assert "2.00 MiB of state per shard x 2 slots x (1 + 1/2) = 6.00 MiB" in message
    assert f"free space of {small_tmpfs} leaves 4.00 MiB" in message
    assert os.listdir(small_tmpfs) == []


def huge_bytes(path: Path) -> int:
    """Bytes of this process's mappings of a file that have huge pages behind (proc(5), smaps)."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found


def test_a_mount_with_huge_pages_gives_them_to_arenas(huge_tmpfs: Path) -> None:
    path = huge_tmpfs / "a.arena"
    header = make_header(geometry=Geometry(2, 16 << 20, 8 << 20, 1 << 20))
    (huge_tmpfs / "probe").write_bytes(bytes(8 << 20))
    with (huge_tmpfs / "probe").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as probe:
        if not any(probe[:: 1 << 20]) and not huge_bytes(huge_tmpfs / "probe"):
            pytest.skip("this kernel has no huge pages to give just now")
    Arena.create(path, header).close()
    with Arena.open(path) as arena:
        assert not arena.data(0).any() and huge_bytes(path) >= 8 << 20
        arena.data(1, writable=True)[:] = 7
    with Arena.open(path) as arena:
        assert (arena.data(1) == 7).all() and not arena.data(0).any()


def test_no_space_during_allocation_is_the_same_error(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took the memory between the check and the allocation."""
    monkeypatch.setattr("megatron_ft.arena.limits.check_memory", lambda *args, **kw: None)
    header = make_header(geometry=Geometry(2, 2 << 20, 1 << 20, 1 << 20))
    with pytest.raises(ArenaMemoryError, match=r"No space left.*leaves") as caught:
        Arena.create(small_tmpfs / "a.arena", header)
    assert "x 2 slots x (1 + 1/2)" in str(caught.value)
    assert os.listdir(small_tmpfs) == []
    assert os.statvfs(small_tmpfs).f_bavail == os.statvfs(small_tmpfs).f_blocks


def test_holes_that_do_not_fit_are_refused_and_never_a_bus_error(small_tmpfs: Path) -> None:
    path = small_tmpfs / "a.arena"
    Arena.create(path, make_header()).close()
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[:32768])
    os.truncate(path, len(raw))
    path.chmod(0o600)
    (small_tmpfs / "full").write_bytes(bytes(os.statvfs(small_tmpfs).f_bavail * 4096))
    with pytest.raises(ArenaMemoryError, match="holes"):
        Arena.open(path)


# Views and their incarnations.


def test_read_only_views_cannot_be_made_writable(path: Path) -> None:
    with Arena.open(path) as arena:
        for view in (arena.data(0), arena.parity(0), arena.parity_digests(0)):
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True


STRAY_WRITE = """
import ctypes, sys
from pathlib import Path
from megatron_ft.arena import mapping
from megatron_ft.arena.arena import Arena
arena = Arena.open(Path(sys.argv[1]))
arena.write_progress(5)
arena.parity(0, writable=True)[0] = 1
view = getattr(arena, sys.argv[2])(0)
print("mapped", flush=True)
ctypes.memset(view.ctypes.data, 1, 1)
print("corrupted", flush=True)
"""


@pytest.mark.parametrize("region", ["data", "parity", "parity_digests"])
def test_a_stray_write_through_a_read_only_view_kills_the_writer(path: Path, region: str) -> None:
    """Past numpy, as C code would do it; although the process may write parity and progress."""
    done = run(STRAY_WRITE, path, region)
    assert done.stdout == "mapped\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
    with Arena.open(path) as arena:
        assert not arena.data(0).any()
        assert arena.parity(0)[0] == 1


def mapped_ranges(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_close_leaves_live_views_alone_and_unmaps_with_the_last_one(path: Path) -> None:
    arena = Arena.open(path)
    views = [arena.data(0), arena.data(1, writable=True), arena.parity(0)[5:9]]
    views[1][:] = 7
    arena.close()
    arena.close()
    assert mapped_ranges(path) > 0
    assert (views[1] == 7).all() and not views[0].any()
    views[1][0] = 8
    views.clear()
    gc.collect()
    assert mapped_ranges(path) == 0
    with Arena.open(path) as again:
        assert again.data(1)[0] == 8


def test_close_without_views_unmaps_and_closes_at_once(path: Path) -> None:
    def open_files() -> int:
        links = (Path("/proc/self/fd", n) for n in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link) == str(path) for link in links)

    with Arena.open(path) as arena:
        arena.data(0, writable=True)[0] = 1
        arena.write_progress(1)
        assert mapped_ranges(path) > 0 and open_files() > 0
    assert (mapped_ranges(path), open_files()) == (0, 0)
    dropped = Arena.open(path)
    dropped.data(0, writable=True)[0] = 1
    del dropped
    assert (mapped_ranges(path), open_files()) == (0, 0)


def test_refused_files_leave_no_descriptor(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ArenaForeignError):
            Arena.open(path, job=uuid.UUID(int=1))
        with pytest.raises(ArenaError):
            Arena.create(path, make_header())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_arena_says_so(path: Path) -> None:
    arena = Arena.open(path)
    arena.close()
    for use in (arena.permit, lambda: arena.data(0), lambda: arena.write_progress(1)):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_data_keeps_its_address(path: Path) -> None:
    """CUDA registers a region once: every later view must be of the same memory."""
    with Arena.open(path) as arena:
        first, second = arena.data(0, writable=True), arena.data(0, writable=True)
        assert first.ctypes.data == second.ctypes.data
        assert first.ctypes.data % 4096 == 0


def test_prefault_maps_every_page_and_changes_none(folder: Path) -> None:
    header = make_header(geometry=Geometry(1, 8 << 20, 4 << 20, 1 << 20))
    path = folder / "a.arena"
    with Arena.create(path, header) as arena:
        arena.data(0, writable=True)[:] = 5
    with Arena.open(path) as arena:
        view = arena.data(0, writable=True)
        arena.prefault(0)
        before = page_faults()
        view[::4096] = 5
        assert page_faults() - before < 100, "2048 pages were touched"
        assert (view == 5).all()


def test_kernels_that_cannot_populate_have_every_page_touched(folder: Path) -> None:
    size = 64 * 4096
    with (folder / "file").open("w+b") as file:
        file.truncate(size)
        patch(folder / "file", 5 * 4096, b"kept")
        mapping = Mapping(file.fileno(), 4096, size - 4096, writable=True, name="file")
        mapping._touch(0, mapping._length)
        assert os.fstat(file.fileno()).st_blocks * 512 == size - 4096
        assert mapping.read(4 * 4096, 4) == b"kept"
        mapping.close()


def kernel_joins_pages() -> bool:
    """Whether it has MADV_COLLAPSE, huge pages, and no word against them on a tmpfs."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not kernel_joins_pages(), reason="this kernel gives no huge pages to files")
def test_an_arena_has_huge_pages_without_a_mount_of_its_own(folder: Path) -> None:
    path = folder / "a.arena"
    header = make_header(geometry=Geometry(2, 16 << 20, 8 << 20, 1 << 20))
    Arena.create(path, header).close()
    with Arena.open(path) as arena:
        for slot in (0, 1):
            written = arena.data(slot, writable=True)
            assert not written.any()
            written[:] = 7 + slot
        # What was written, all but both ends of each slot.
        assert huge_bytes(path) >= 2 * (16 - 4) << 20
    with Arena.open(path) as arena:
        assert (arena.data(0) == 7).all() and (arena.data(1) == 8).all()


@pytest.mark.skipif(not kernel_joins_pages(), reason="this kernel gives no huge pages to files")
@pytest.mark.parametrize("units", [0.5, 1.0, 1.5, 2.25])
def test_what_is_no_whole_huge_page_stays_a_hole(folder: Path, units: float) -> None:
    """It is allocated afterwards, where too little memory is a clear error."""
    unit = huge_pages.huge_page_bytes()
    with (folder / "file").open("w+b") as file:
        file.truncate(int(units * unit))
        assert not huge_pages.allocate(file.fileno(), 0, int(units * unit)) or units >= 1
        assert os.fstat(file.fileno()).st_blocks * 512 <= int(units) * unit


def test_a_file_without_huge_pages_is_left_as_it_was(tmp_path: Path) -> None:
    """No tmpfs, so the kernel refuses; an arena is then made of small pages."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(8 << 20)
        assert not huge_pages.allocate(file.fileno(), 0, 8 << 20)
        file.seek(0)
        assert file.read() == bytes(8 << 20)


@pytest.mark.parametrize("offset", [0, 4096, 3 << 20])
def test_mappings_lie_where_huge_pages_fit(folder: Path, offset: int) -> None:
    unit = huge_pages.huge_page_bytes()
    with (folder / "file").open("w+b") as file:
        file.truncate(offset + 3 * unit)
        mapping = Mapping(file.fileno(), offset, 3 * unit, writable=True, name="file")
        view = mapping.view(np.uint8, 0, 3 * unit)
        assert (view.ctypes.data - offset) % unit == 0
        view[-1] = 9
        assert mapping.read(3 * unit - 1, 1) == b"\x09"
        mapping.close()
        assert view[-1] == 9, "a view keeps its memory"


def test_a_file_that_was_cut_while_it_was_opened_is_not_mapped(folder: Path) -> None:
    """Behind its end every access would be a bus error."""
    with (folder / "file").open("w+b") as file:
        file.truncate(8192)
        with pytest.raises(ArenaTruncatedError, match="file became shorter"):
            Mapping(file.fileno(), 4096, 4097, writable=False, name="file")


def rooms() -> int:
    """Mappings of this process that only keep others away."""
    return sum(" ---p " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_no_address_space_stays_reserved(folder: Path) -> None:
    before = rooms()
    header = make_header(geometry=Geometry(2, 8 << 20, 4 << 20, 1 << 20))
    with Arena.create(folder / "a.arena", header) as arena:
        assert arena.data(0, writable=True).size == 8 << 20
        assert rooms() == before


def page_faults() -> int:
    return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])


# Adoption.

OWNER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.arena_samples import make_header, make_slot
from megatron_ft.arena import mapping
from megatron_ft.arena.arena import Arena
arena = Arena.create(Path(sys.argv[1]), make_header())
arena.data(1, writable=True)[:] = 9
arena.write_slot(1, make_slot())
arena.write_progress(77)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_arena_outlives_its_killed_owner(folder: Path) -> None:
    path = folder / "a.arena"
    done = run(OWNER, path, Path(__file__).parent)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Arena.open(path, job=JOB) as arena:
        assert (arena.slot(1), arena.progress()) == (make_slot(), 77)
        assert (arena.data(1) == 9).all()
        arena.write_slot(1, SlotHeader())
        assert arena.slot(1) == SlotHeader()


def test_an_unlinked_arena_lives_on_with_whoever_has_it_open(path: Path) -> None:
    with Arena.open(path) as arena:
        path.unlink()
        arena.write_progress(3)
        arena.data(0, writable=True)[:] = 4
        assert arena.progress() == 3 and (arena.data(0) == np.uint8(4)).all()
