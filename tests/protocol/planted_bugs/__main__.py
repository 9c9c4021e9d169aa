"""``python -m tests.protocol.planted_bugs``: plant each bug, run its check, and print the table.

Exit code 0: all were caught, and the same checks pass without them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.protocol.planted_bugs.bugs import BUGS, Bug
from tests.protocol.planted_bugs.checking import Checker, Finding, open_checker

HEADINGS = ("bug", "planted", "check", "it says", "without the bug")


def row(bug: Bug, planted: Finding, right: Finding) -> tuple[str, ...]:
    """One line of the table."""
    said = planted.says(bug.says) or ("NOT CAUGHT" if planted.passed else "SAYS SOMETHING ELSE")
    check = f"{bug.kind}: `{bug.check.rpartition('::')[2]}`"
    return bug.name, bug.planted, check, f"`{said}`", "passes" if right.passed else "FAILS"


def lines(checker: Checker) -> list[tuple[str, ...]]:
    """All rows; each check is run without a bug once."""
    right = {check: checker.check([check]) for check in sorted({bug.check for bug in BUGS})}
    return [row(bug, checker.with_bug(bug), right[bug.check]) for bug in BUGS]


def main() -> int:
    """Print the table in Markdown."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        with open_checker(Path(folder)) as checker:
            table = lines(checker)
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *table):
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    caught = not any("NOT CAUGHT" in cells[3] or "ELSE" in cells[3] for cells in table)
    return 0 if caught and all(cells[4] == "passes" for cells in table) else 1


if __name__ == "__main__":
    sys.exit(main())
