"""The documentation names only tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NAME = re.compile(r"\btest_[a-z0-9_]+(?:\.py\b)?")
_QUOTED = re.compile(r"`(test_[a-z0-9_]+\.py)`, \"([^\"]+)\"")
"""A file, and words of the name of one of its tests."""


def functions(folder: Path) -> dict[str, set[str]]:
    """Names of test functions by file."""
    found = {}
    for path in folder.rglob("test_*.py"):
        names = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        found[path.name] = set(names)
    return found


def absent(page: str, tests: dict[str, set[str]]) -> list[str]:
    """The names of files and functions in a page that no test has."""
    known = set(tests) | {name for names in tests.values() for name in names}
    # A file may be named without its ending, as a module or on a command line.
    known |= {name.removesuffix(".py") for name in tests}
    named = [name for name in _NAME.findall(page) if name not in known]
    quoted = [
        f"{file}, {words!r}"
        for file, words in _QUOTED.findall(page)
        if not any(words.replace(" ", "_") in name for name in tests.get(file, ()))
    ]
    return named + quoted


_FILE = re.compile(r"`((?:[a-z_]+/)+[\w-]+\.(?:py|sh|sbatch))`")
FRAMEWORKS = ("megatron/",)
"""Folders of files in the sources of others."""


def absent_files(page: str, files: set[str]) -> list[str]:
    """Files in a page that are in no folder of the repository."""
    named = [name for name in _FILE.findall(page) if not name.startswith(FRAMEWORKS)]
    return [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]


def test_files_that_the_documentation_names_exist() -> None:
    skipped = {".git", ".venv"}
    files = {
        str(path.relative_to(ROOT))
        for top in ROOT.iterdir()
        if top.is_dir() and top.name not in skipped
        for path in top.rglob("*.*")
    }
    found = {page.name: absent_files(page.read_text(), files) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_a_file_that_is_gone_is_found() -> None:
    page = "`core/a.py`, `core/b.py`, `a.py` and `megatron/training/arguments.py`"
    assert absent_files(page, {"megatron_ft/core/a.py"}) == ["core/b.py"]


def test_tests_that_the_documentation_names_exist() -> None:
    tests = functions(ROOT / "tests")
    found = {page.name: absent(page.read_text(), tests) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_a_name_that_no_test_has_is_found() -> None:
    tests = {"test_a.py": {"test_it_works"}}
    page = '`test_a.py`, "it works"; `test_a.py`, "it fails"; `test_b.py`; `test_it_worked[x]`'
    assert absent(page, tests) == ["test_b.py", "test_it_worked", "test_a.py, 'it fails'"]
