"""A main thread is interrupted wherever a survivor of a failure stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_host import Request

WAYS = (
    *("in_python", "in_system_call", "in_lock", "in_swallowing_code", "in_loader", "connecting"),
    *("all_reduce", "barrier", "broadcast", "store_get", "store_wait", "rendezvous"),
)
ROUNDS = 2
MOST_SECONDS = 1.5
"""Below the 2 s after which an SMP kills a survivor; code that swallows it is asked twice more."""


@pytest.mark.mpi
def test_a_training_function_ends_within_the_time_that_its_smp_waits(
    warm_host: Any, tmp_path: Path
) -> None:
    outcome = warm_host.run(
        Request(
            entry="tests.programs.interrupted_program:main",
            argv=[str(ROUNDS), *WAYS],
            ranks=2,
            logs=str(tmp_path),
            timeout_seconds=100.0,
        )
    )
    assert not any(outcome.codes), outcome.story()
    for rank in range(2):
        lines = [line.split() for line in outcome.output(rank).splitlines()]
        found = [words for words in lines if len(words) == 5 and words[0] in WAYS]
        assert len(found) == ROUNDS * len(WAYS), outcome.story()
        late = {words[0]: words[1] for words in found if float(words[1]) > MOST_SECONDS}
        assert not late, outcome.story()
