"""A copy of the package and its tests, with a bug in it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("megatron_ft", "deepspeed_ext", "tests", "examples", "pyproject.toml")
PACKAGE = "megatron_ft"


@dataclass(frozen=True)
class Edit:
    """Lines of the package and what the bug makes of them.

    ``right`` is found by itself, wherever in the package it is, so that it may move to
    another file; it has to be there exactly once.
    """

    right: str
    wrong: str


class PlaceGoneError(Exception):
    """What a bug replaces is not in the package any more, or more than once."""


def copy_package(folder: Path) -> None:
    """Copy all that tests need; compiled modules come along and stay valid."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy2(source, folder / name)


def plant(folder: Path, edits: tuple[Edit, ...]) -> None:
    """Put the bug into a copy."""
    for edit in edits:
        path = find(folder, edit)
        path.write_text(path.read_text().replace(edit.right, edit.wrong))


def find(folder: Path, edit: Edit) -> Path:
    """The file that an edit changes; PlaceGoneError unless there is exactly one place."""
    counts = {path: path.read_text().count(edit.right) for path in _sources(folder)}
    places = [path for path, count in counts.items() for _ in range(count)]
    if len(places) != 1:
        where = ", ".join(str(path.relative_to(folder)) for path in places) or "nowhere"
        raise PlaceGoneError(
            f"a planted bug replaces these lines, which are to be found once: {where}.  Give "
            f"tests/protocol/planted_bugs/bugs.py those that do the same now:\n{edit.right}"
        )
    return places[0]


def _sources(folder: Path) -> list[Path]:
    return sorted((folder / PACKAGE).rglob("*.py"))
