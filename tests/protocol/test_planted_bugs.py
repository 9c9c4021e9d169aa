"""A test of the tests: each planted bug is caught by a check that passes without it.

The table: python -m tests.protocol.planted_bugs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.protocol.planted_bugs.bugs import BUGS, Bug
from tests.protocol.planted_bugs.checking import Checker, all_passed, open_checker
from tests.protocol.planted_bugs.planting import Edit, PlaceGoneError, find


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    with open_checker(tmp_path_factory.mktemp("planted")) as checker:
        yield checker


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name}, {bug.planted}")
def test_a_planted_bug_is_caught(checker: Checker, bug: Bug) -> None:
    found = checker.with_bug(bug)
    assert not found.passed, f"nothing notices that {bug.planted}: make the check stronger"
    assert found.says(bug.says), f"it fails for another reason:\n{found.output[-5000:]}"


@pytest.mark.all_layouts
def test_the_same_checks_pass_without_a_bug(checker: Checker) -> None:
    """CI runs each of them where it stands; here on a copy of the package, as with a bug."""
    right = checker.check(sorted({bug.check for bug in BUGS}))
    assert right.passed, right.output[-5000:]


@pytest.mark.parametrize(
    ("sources", "where"), [(["a"], "nowhere"), (["x = 1\n", "x = 1\n"], "0.py, .*1.py")]
)
def test_a_bug_whose_place_is_gone_is_an_error(
    sources: list[str], where: str, tmp_path: Path
) -> None:
    package = tmp_path / "megatron_ft"
    package.mkdir()
    for number, text in enumerate(sources):
        (package / f"{number}.py").write_text(text)
    with pytest.raises(PlaceGoneError, match=where):
        find(tmp_path, Edit("x = 1\n", "x = 2\n"))


@pytest.mark.parametrize(
    ("last", "passed"),
    [
        ("3 passed in 1.2s", True),
        ("3 passed, 2 skipped in 1.2s", True),
        ("3 passed, 1 error in 1.2s", False),
        ("3 passed, 2 errors in 1.2s", False),
        ("1 failed, 3 passed in 1.2s", False),
        ("1 error in 1.2s", False),
        ("no tests ran in 0.1s", False),
        ("Killed", False),
    ],
)
def test_only_tests_that_have_run_count_as_passed(last: str, passed: bool) -> None:
    assert all_passed(f"1 passed\n{last}\n") is passed
