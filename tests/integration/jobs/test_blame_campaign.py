"""The campaign of injected faults: its plan, its rule, and ten of its faults in a real job."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import blame_campaign as b
from tests.support.networks import needs_network


@given(st.integers(0, 1 << 32))
def test_ten_faults_of_a_plan_are_of_all_kinds(seed: int) -> None:
    drawn = b.plan(seed, 40)
    assert drawn == b.plan(seed, 40) and drawn[:25] == b.plan(seed, 25)
    for first in range(0, 40, 10):
        assert {fault.kind for fault in drawn[first : first + 10]} == set(b.KINDS)
    hit = [fault.rank for fault in drawn if fault.variant != "slow"]
    assert all(one != other for one, other in zip(hit, hit[1:], strict=False))
    assert {rank for rank in hit} == set(range(b.NODES))


EXPECTED = b.Named(1, "n1", "hang", "data loader")


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (EXPECTED, b.RIGHT),
        (None, b.UNKNOWN),
        (b.Named(-1, "", "unknown"), b.UNKNOWN),
        (b.Named(1, "n1", "hang"), b.UNKNOWN),
        (b.Named(-1, "", "hang"), b.UNKNOWN),
        (b.Named(1, "n1", "hang", "suspended"), b.WRONG),
        (b.Named(1, "n1", "signal"), b.WRONG),
        (b.Named(0, "n0", "hang", "data loader"), b.WRONG),
        (b.Named(1, "n2", "hang", "data loader"), b.WRONG),
    ],
)
def test_what_is_not_said_is_not_wrong(found: b.Named | None, outcome: str) -> None:
    assert b.outcome(EXPECTED, found) == outcome


@needs_network
@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_of_ten_faults_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    code = b.main(["--seed", "1", "--faults", "10", "--json", str(found)])
    said = capfd.readouterr().out
    outcomes = Counter(one["outcome"] for one in json.loads(found.read_text()))
    assert outcomes[b.RIGHT] >= 9 and not outcomes[b.WRONG], said
    assert code in (0, 1) and "named without a fault: 0" in said
