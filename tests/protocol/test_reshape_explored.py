"""A reshape, and larger arenas made in a run, explored.

Each step can be the last, and each change of a file within a step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.protocol.model.reshape import explore


def test_no_step_of_a_reshape_loses_the_state() -> None:
    with tempfile.TemporaryDirectory(prefix="reshape-", dir="/dev/shm") as folder:
        assert explore(Path(folder), faults=1) > 300


def test_no_step_towards_larger_arenas_loses_the_state() -> None:
    with tempfile.TemporaryDirectory(prefix="renewal-", dir="/dev/shm") as folder:
        assert explore(Path(folder), faults=1, renews=True) > 100
