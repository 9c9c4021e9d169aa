"""Kinds of damage to an arena file."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import HEADER_COPY_BYTES, HEADER_OFFSET


def overwrite(path: Path, at: int, length: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * length)


def arena_header(path: Path) -> None:
    overwrite(path, HEADER_OFFSET, 2 * HEADER_COPY_BYTES)


def slot_headers(path: Path) -> None:
    with Arena.open(path) as arena:
        at = arena.geometry.slot_header_offset(0)
    overwrite(path, at, arena.geometry.control_bytes - at)


def magic(path: Path) -> None:
    overwrite(path, 3, 1)


def extended(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def closed(path: Path) -> None:
    path.chmod(0o000)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def second_name(path: Path) -> None:
    os.link(path, path.with_name("second"))


def damaged_records(arena: Arena) -> list[str]:
    """Names of the headers of which a copy is not whole."""
    return [name for name, place in arena._headers() if arena._is_damaged(place)]
