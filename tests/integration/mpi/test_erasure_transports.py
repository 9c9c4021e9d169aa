"""Every scheme, every loss and every awkward length over real MPI, and over TCP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ft.erasure.world import MPI, TCP
from tests.support.erasure_world import BOTH, PROGRAMS, run_world

TIMEOUT = 180.0
RANKS = {MPI: 5, TCP: 4}


@BOTH
def test_every_loss_of_every_stripe(transport: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / "erasure_transport_cases.py")
    status, output = run_world(transport, [program], RANKS[transport], tmp_path, TIMEOUT)
    assert status == 0, output
    assert "losses rebuilt" in output


@pytest.mark.mpi
def test_waiting_leaves_the_processor_to_others(tmp_path: Path) -> None:
    """MPI's own wait spins, on processors that trainers want."""
    program = str(PROGRAMS / "waiting_rank.py")
    status, output = run_world(MPI, [program], 2, tmp_path, TIMEOUT)
    assert status == 0, output
    slept = re.search(r"slept (\d+) times", output)
    assert slept is not None and int(slept.group(1)) > 100, output


@pytest.mark.mpi
def test_a_stalled_member_is_sent_nothing_that_it_has_no_buffer_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a network MPI would send whole pieces ahead, and a slow member keep them all."""
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "lo")
    program = str(PROGRAMS / "stalled_rank.py")
    status, output = run_world(MPI, [program], 2, tmp_path, TIMEOUT)
    assert status == 0, output
    assert "0 of 4 count as sent" in output and "all were sent in the end" in output, output
