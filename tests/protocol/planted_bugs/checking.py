"""Runs tests of the suite on a copy of the package, with or without a bug."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.protocol.planted_bugs.bugs import Bug
from tests.protocol.planted_bugs.in_child import COPY
from tests.protocol.planted_bugs.planting import Edit, copy_package, plant
from tests.support.warm_host import Request, WarmHost

TIMEOUT_SECONDS = 240.0
ENVIRONMENT = {
    # Once a walk has shown what a bug does, its shortest form is of no interest.
    "MEGATRON_FT_MODEL_SHORTEN": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Finding:
    """How the tests ended, how long they took, and what they wrote."""

    passed: bool
    seconds: float
    output: str

    def says(self, words: str) -> str:
        """The part of the output that these words (a regular expression) match, or ''."""
        found = re.search(words, self.output)
        return found[0] if found else ""


class Checker:
    """Starts pytest on copies in ``folder``; made by ``open_checker``."""

    def __init__(self, server: WarmHost, folder: Path) -> None:
        self._server, self._folder, self._runs = server, folder, 0

    def check(self, tests: Iterable[str], edits: tuple[Edit, ...] = ()) -> Finding:
        """Run tests (pytest's node ids) on a copy of the package with these edits."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        copy = folder / "copy"
        copy_package(copy)
        plant(copy, edits)
        environment = {**ENVIRONMENT, COPY: str(copy), "PYTHONPATH": str(copy)}
        request = Request(
            entry="tests.protocol.planted_bugs.in_child:main",
            argv=list(tests),
            ranks=1,
            logs=str(folder),
            timeout_seconds=TIMEOUT_SECONDS,
            environment=environment,
        )
        outcome = self._server.run(request)
        output = outcome.output(0)
        return Finding(all_passed(output), outcome.seconds, output)

    def with_bug(self, bug: Bug) -> Finding:
        """Run the bug's check on a copy that has it."""
        return self.check([bug.check], bug.edits)


def all_passed(output: str) -> bool:
    """Tell if pytest says that tests passed, and that none failed or ended with an error."""
    last = output.rstrip().rpartition("\n")[2]
    passed = re.search(r"\b[1-9]\d* passed\b", last) is not None
    return passed and re.search(r"\b\d+ (failed|errors?)\b", last) is None


@contextmanager
def open_checker(folder: Path) -> Iterator[Checker]:
    """A checker that keeps its copies in ``folder``."""
    server = WarmHost("tests.protocol.planted_bugs.in_child", {"OMP_NUM_THREADS": "1"})
    try:
        yield Checker(server, folder)
    finally:
        server.close()
