"""The documentation names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def test_tests_that_the_documentation_names_exist() -> None:
    tests = functions(ROOT / "tests")
    found = {page.name: absent(page.read_text(), tests) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_a_name_that_no_test_has_is_found() -> None:
    tests = {"test_a.py": {"test_it_works"}}
    page = '`test_a.py`, "it works"; `test_a.py`, "it fails"; `test_b.py`; `test_it_worked[x]`'
    assert absent(page, tests) == ["test_b.py", "test_it_worked", "test_a.py, 'it fails'"]
