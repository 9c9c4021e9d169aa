"""Rebuilding of real arenas for practice, as a stopped job leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ft.arena.format import SlotState
from megatron_ft.cli.main import main
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.encode import encode
from tests.support.bit_flips.stripe import SLOT, Stripe
from tests.support.erasure_samples import ThreadTransport, ThreadWorld


@pytest.fixture(params=["xor:3", "rs:2+2", "replica:2"])
def stripe(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stripe]:
    """Each member's arena in the folder of a node of its own."""
    made = tmp_path / "made"
    made.mkdir(mode=0o700)
    stripe = Stripe(made, Scheme.parse(request.param), seed=3)
    for number, path in enumerate(stripe.paths):
        folder = tmp_path / "job" / f"n{number}"
        folder.mkdir(parents=True, mode=0o700)
        path.rename(folder / path.name)
    yield stripe
    stripe.close()


@pytest.fixture(autouse=True)
def own_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is called in this process, which keeps its priority for the other tests."""
    monkeypatch.setattr("megatron_ft.cli.verify.lower_priority", lambda: None)


def verify(tmp_path: Path, *words: str) -> int:
    return main(["verify", "--rebuild", "--arena-dir", str(tmp_path), "--job", "job", *words])


def test_every_nodes_shards_are_rebuilt_as_they_are(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [raw.copy() for raw in stripe.raw]
    assert verify(tmp_path) == 0
    assert capsys.readouterr().out.count("every byte as it is there") == stripe.code.members
    assert all(np.array_equal(a, b) for a, b in zip(before, stripe.raw, strict=True))


def test_json_counts_data_and_parity_of_every_node(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    each = stripe.code.data_bytes + stripe.code.parity_bytes
    assert [(n["node"], n["shards"], n["bytes"], n["problem"]) for n in found["rebuilt"]] == [
        (f"n{number}", 1, each, "") for number in range(stripe.code.members)
    ]
    assert found["snapshots"][0]["shards"] == stripe.code.members
    assert found["problems"] == []


def test_a_live_shard_that_differs_is_reported(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = stripe.view(1)
    for region in (view.data, view.parity):
        region[5] ^= 1
        assert verify(tmp_path) == 3
        told = capsys.readouterr().out
        assert "node n1: shard1 cannot be rebuilt as it is: rebuilt bytes differ" in told
        assert "node n1 as if lost" not in told
        region[5] ^= 1
    assert verify(tmp_path) == 0


def test_a_damaged_source_is_found_and_used_by_nobody(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stripe.view(1).data[:: stripe.code.block_bytes] ^= 1
    stripe.view(1).parity[:: stripe.code.block_bytes] ^= 1
    assert verify(tmp_path) == 3
    told = capsys.readouterr().out
    assert "node n1: shard1 cannot be rebuilt as it is: rebuilt bytes differ" in told
    refused = "node n0: shard0 cannot be rebuilt as it is: at block 0 fewer than" in told
    assert refused == (stripe.code.parity_members == 1), "others are enough where there are more"


def test_a_node_whose_loss_parity_cannot_replace_is_a_problem(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All members but one on one node, as a job with too few nodes would place them."""
    for path in sorted((tmp_path / "job").glob("n[!0]/*.arena")):
        path.rename(tmp_path / "job" / "n1" / path.name)
    assert verify(tmp_path) == (0 if stripe.code.members == 2 else 3)
    if stripe.code.members > 2:
        assert "node n1: shard1 cannot be rebuilt as it is: 1 of the other" in (
            capsys.readouterr().out
        )


def test_without_a_protected_snapshot_nothing_is_claimed(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arena, slots in zip(stripe.arenas, stripe.slots, strict=True):
        arena.write_slot(SLOT, replace(slots[SLOT], state=SlotState.SEALED, parity_valid=False))
    assert verify(tmp_path) == 4
    assert "is protected (yet)" in capsys.readouterr().out
    assert main(["verify", "--rebuild", "--arena-dir", str(tmp_path), "--job", "absent"]) == 2
    assert main(["verify", "--rebuild", str(tmp_path)]) == 2


def test_the_stripe_of_the_samples_is_what_encoders_make(stripe: Stripe) -> None:
    """The sample's parity is computed in one process; encoders must come to the same."""
    before = [stripe.view(n).parity.copy() for n in range(stripe.code.members)]
    for n in range(stripe.code.members):
        stripe.view(n).parity[:] = 0

    def work(rank: int, transport: ThreadTransport) -> bytes:
        peers = range(stripe.code.members)
        return encode(stripe.code, stripe.view(rank), transport, peers).parity_root

    roots = ThreadWorld(stripe.code.members).run(work)
    assert roots == [slots[SLOT].parity_root for slots in stripe.slots]
    assert all(np.array_equal(p, stripe.view(n).parity) for n, p in enumerate(before))
