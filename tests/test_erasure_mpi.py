"""Every scheme, every loss and every awkward length over real MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
from erasure_world import TESTS, run_world

pytestmark = pytest.mark.mpi

TIMEOUT = 180.0
RANKS = 5


def test_every_loss_of_every_stripe(tmp_path: Path) -> None:
    program = str(TESTS / "erasure_mpi_cases.py")
    status, output = run_world([program], RANKS, tmp_path, TIMEOUT)
    assert status == 0, output
    assert "losses rebuilt" in output
