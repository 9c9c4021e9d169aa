"""Memory of an arena's slots: that of the first is made at once, that of others can come later."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import Geometry
from megatron_ft.core.errors import ArenaMemoryError
from tests.support.arena_samples import make_header, make_slot
from tests.support.tmpfs import mount_tmpfs

SIZES = Geometry(2, 8 << 20, 4 << 20, 1 << 20)
HEADER = make_header(geometry=SIZES)


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arena-test-", dir="/dev/shm") as name:
        yield Path(name) / "a.arena"


@pytest.fixture
def small(path: Path) -> Iterator[Path]:
    """A tmpfs with room for one arena, and a little more."""
    yield from mount_tmpfs(path.with_name("small"), "size=26m,mode=0700")


def fill(folder: Path) -> Path:
    """Leave no room in a file system."""
    rest = os.statvfs(folder)
    (folder / "full").write_bytes(bytes(rest.f_bavail * rest.f_frsize))
    return folder / "full"


def ever() -> bool:
    return True


def test_other_slots_get_their_memory_later_and_no_byte_changes(path: Path) -> None:
    with Arena.create(path, HEADER, first_slot=True) as arena:
        assert 0 < SIZES.slot_span - arena.holes <= 2 << 20
        arena.data(0, writable=True)[:] = 7
        arena.parity(0, writable=True)[:] = 8
        arena.complete(ever)
        assert not arena.holes
        assert (arena.data(0) == 7).all() and (arena.parity(0) == 8).all()
        assert not arena.data(1).any()


def test_what_is_written_to_a_slot_meanwhile_stays(path: Path) -> None:
    """A rebuild may have taken it for its target."""
    with Arena.create(path, HEADER, first_slot=True) as arena:
        arena.data(1, writable=True)[:] = 9
        arena.complete(ever)
        assert (arena.data(1) == 9).all() and not arena.holes


@pytest.mark.parametrize("used", [False, True])
def test_whoever_opens_it_makes_memory_only_of_slots_that_hold_something(
    path: Path, used: bool
) -> None:
    with Arena.create(path, HEADER, first_slot=True) as arena:
        if used:
            arena.write_slot(1, make_slot())
        before = arena.holes
        Arena.open(path).close()
        assert arena.holes == (0 if used else before)


def test_an_arena_opens_on_a_full_file_system(small: Path) -> None:
    """Nothing of its first slot is missing, and nothing is asked for."""
    Arena.create(small / "a.arena", HEADER, first_slot=True).close()
    fill(small)
    with Arena.open(small / "a.arena") as arena:
        assert arena.holes and not arena.data(0).any()


def test_memory_that_is_not_there_later_is_an_error_and_never_a_bus_error(small: Path) -> None:
    with Arena.create(small / "a.arena", HEADER, first_slot=True) as arena:
        full, before = fill(small), arena.holes
        with pytest.raises(ArenaMemoryError, match=r"behind the.*free space of .* leaves 0 b"):
            arena.complete(ever)
        assert arena.holes == before
        full.unlink()
        arena.complete(ever)
        assert not arena.holes


@pytest.mark.parametrize("owed", [0, 8 << 20])
def test_all_slots_must_find_room_at_the_start(small: Path, owed: int) -> None:
    """And what was promised to other arenas, beside."""
    (small / "other").write_bytes(bytes((8 << 20) - owed))
    with pytest.raises(ArenaMemoryError, match="8.00 MiB of it for" if owed else "leaves 18.00"):
        Arena.create(small / "a.arena", HEADER, first_slot=True, owed=owed)
    assert os.listdir(small) == ["other"]


def test_it_ends_before_the_next_piece_if_it_shall(path: Path) -> None:
    with Arena.create(path, HEADER, first_slot=True) as arena:
        before = arena.holes
        arena.complete(lambda: False)
        assert arena.holes == before


def test_a_source_that_returns_has_memory_in_its_first_slot(path: Path) -> None:
    with Arena.create(path, HEADER) as arena:
        arena.write_slot(1, make_slot())
        arena.release(0)
        assert arena.holes
        arena.reserve(first_slot=True)
        assert not arena.holes
