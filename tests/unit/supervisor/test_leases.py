"""How long nodes that cannot be reached may still train."""

from __future__ import annotations

import time

import pytest

from megatron_ft.supervisor.membership import OutstandingLeases


def test_the_node_that_was_heard_of_last_is_waited_for() -> None:
    leases, now = OutstandingLeases(1000.0), time.monotonic()
    leases.record("n0", now - 900.0)
    leases.record("n1", now - 500.0)
    leases.record("n2", now - 1500.0)
    assert leases.left(["n0", "n1", "n2"]) == pytest.approx(500.0, abs=60.0)
    assert leases.left(["n0"]) == pytest.approx(100.0, abs=60.0)
    assert leases.left(["n2"]) < 0


def test_of_whom_nothing_was_heard_the_supervisor_before_may_have() -> None:
    """It may have renewed the lease until this one began."""
    leases = OutstandingLeases(1000.0)
    leases.record("n0", time.monotonic() - 2000.0)
    assert leases.left(["n0", "n1"]) == pytest.approx(1000.0, abs=60.0)
