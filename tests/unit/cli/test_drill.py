"""The fire drill on real arenas, as a stopped job leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
    folder = tmp_path / "job" / "node0"
    folder.mkdir(parents=True, mode=0o700)
    stripe = Stripe(folder, Scheme.parse(request.param), seed=3)
    yield stripe
    stripe.close()


@pytest.fixture(autouse=True)
def own_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is called in this process, which keeps its priority for the other tests."""
    monkeypatch.setattr("megatron_ft.cli.drill.lower_priority", lambda: None)


def drill(tmp_path: Path, *words: str) -> int:
    return main(["drill", "--arena-dir", str(tmp_path), *words])


def test_every_shard_is_rebuilt_as_it_is(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [raw.copy() for raw in stripe.raw]
    for shard in stripe.shards:
        assert drill(tmp_path, "--shard", shard) == 0
        assert "every byte as it is there" in capsys.readouterr().out
    assert all(np.array_equal(a, b) for a, b in zip(before, stripe.raw, strict=True))


def test_a_seed_repeats_a_drill(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drill(tmp_path, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert drill(tmp_path, "--json", "--seed", str(first["seed"])) == 0
    again = json.loads(capsys.readouterr().out)
    assert first | {"seconds": 0} == again | {"seconds": 0}
    assert first["bytes"] == stripe.code.data_bytes + stripe.code.parity_bytes


def test_a_live_shard_that_differs_is_told(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = stripe.view(1)
    for region in (view.data, view.parity):
        region[5] ^= 1
        assert drill(tmp_path, "--shard", stripe.shards[1]) == 3
        assert "1 rebuilt pieces differ" in capsys.readouterr().out
        region[5] ^= 1
    assert drill(tmp_path, "--shard", stripe.shards[1]) == 0


def test_a_damaged_source_is_named(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stripe.view(1).data[:: stripe.code.block_bytes] ^= 1
    stripe.view(1).parity[:: stripe.code.block_bytes] ^= 1
    codes = {drill(tmp_path, "--shard", stripe.shards[0], "--seed", str(s)) for s in range(8)}
    assert 3 in codes and "shard shard1, block" in capsys.readouterr().out


def test_without_a_protected_snapshot_nothing_is_claimed(
    stripe: Stripe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drill(tmp_path, "--shard", "other") == 4
    for arena, slots in zip(stripe.arenas, stripe.slots, strict=True):
        arena.write_slot(SLOT, replace(slots[SLOT], state=SlotState.SEALED, parity_valid=False))
    assert drill(tmp_path, "--shard", stripe.shards[0]) == 4
    assert "is protected (yet)" in capsys.readouterr().out
    assert drill(tmp_path, "--job", "absent") == 2


def test_the_stripe_of_the_drill_is_what_encoders_make(stripe: Stripe) -> None:
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
