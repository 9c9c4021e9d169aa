"""Every scheme, every loss and every awkward length over real MPI, and over TCP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from erasure_world import BOTH, TESTS, run_world

from megatron_ft.erasure.world import MPI, TCP

TIMEOUT = 180.0
RANKS = {MPI: 5, TCP: 4}


@BOTH
def test_every_loss_of_every_stripe(transport: str, tmp_path: Path) -> None:
    program = str(TESTS / "erasure_transport_cases.py")
    status, output = run_world(transport, [program], RANKS[transport], tmp_path, TIMEOUT)
    assert status == 0, output
    assert "losses rebuilt" in output


@pytest.mark.mpi
def test_waiting_leaves_the_processor_to_others(tmp_path: Path) -> None:
    """MPI's own wait spins, on processors that trainers want."""
    program = str(TESTS / "waiting_rank.py")
    status, output = run_world(MPI, [program], 2, tmp_path, TIMEOUT)
    assert status == 0, output
    slept = re.search(r"slept (\d+) times", output)
    assert slept is not None and int(slept.group(1)) > 100, output
