"""``save_checkpoint`` through our checkpoint engine, on DeepSpeed's real engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.programs.deepspeed_saving_program import MASTERS, notes_of
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.deepspeed
FULL = "OSError: [Errno 28] No space left on device"


class Ran:
    """A scenario of deepspeed_saving_program that was run by two ranks."""

    def __init__(self, server: WarmHost, folder: Path, scenario: str) -> None:
        self.folder = folder
        self._notes = notes_of(server, folder, scenario, 2)

    def notes(self, rank: int = 0) -> Any:
        """What a rank noted."""
        return self._notes[rank]

    def files(self, name: str) -> dict[str, bytes]:
        """Contents by path of a folder in this one."""
        top = self.folder / name
        return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def saving(deepspeed_server: WarmHost, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(deepspeed_server, tmp_path_factory.mktemp("saving"), "saving")


def test_files_are_those_of_the_inner_engine(saving: Ran) -> None:
    plain, ours = saving.files("plain"), saving.files("ours")
    assert {"pytorch_model.bin", "zero_to_fp32.py", "latest"} < plain.keys()
    assert sum(name.startswith("one/") for name in plain) == 3
    same = {name: ours.get(name) == content for name, content in plain.items()}
    same.pop("latest")  # it moved on
    assert all(same.values()), same
    assert not [name for name in ours if name.endswith(".tmp")]


def test_latest_is_written_where_it_is_asked_for(saving: Ran) -> None:
    notes = saving.notes()
    assert notes["returned"] is True
    assert notes["latest"] == "one", "save_16bit_model must not touch it"
    assert notes["unnamed"] == "slow", "save_latest=False must not touch it"
    assert "unnamed/mp_rank_00_model_states.pt" in saving.files("ours")


def test_weights_that_rank_0_saves_alone_wait_for_nobody(saving: Ran) -> None:
    """DeepSpeed says to call it everywhere, and does not mind if not but with ZeRO-3."""
    assert saving.files("alone") == {"pytorch_model.bin": saving.files("ours")["pytorch_model.bin"]}


def test_latest_waits_for_a_slow_rank(saving: Ran) -> None:
    assert saving.notes(1)["slow"] == {"named": "one", "then": "slow"}


@pytest.mark.parametrize("place", ["save", "commit", "state"])
def test_if_rank_1_fails_both_raise_and_latest_stays(saving: Ran, place: str) -> None:
    ranks = [saving.notes(rank)["failures"][place] for rank in (0, 1)]
    assert [rank["latest"] for rank in ranks] == ["slow", "slow"]
    assert ranks[1]["raised"] == FULL
    assert ranks[0]["raised"].startswith("CheckpointSaveError")
    assert f"'bad-{place}'" in ranks[0]["raised"] and f"rank 1: {FULL}" in ranks[0]["raised"]


@pytest.mark.parametrize("place", ["latest", "folder"])
def test_if_rank_0_fails_both_raise_and_latest_stays(saving: Ran, place: str) -> None:
    ranks = [saving.notes(rank)["failures"][place] for rank in (0, 1)]
    assert [rank["latest"] for rank in ranks] == ["slow", "slow"]
    assert ranks[0]["raised"] == FULL
    assert f"rank 0: {FULL}" in ranks[1]["raised"]


def test_a_save_after_failures_succeeds_and_loads(saving: Ran) -> None:
    assert [saving.notes(rank)["after"] for rank in (0, 1)] == ["after", "after"]
    assert [saving.notes(rank)["loaded"] for rank in (0, 1)] == ["after", "after"]


def test_a_snapshot_knows_the_step_of_what_latest_names(saving: Ran) -> None:
    assert saving.notes()["last_save_before"] == ["slow", -1, -1], "failed saves do not count"
    assert saving.notes()["last_save"] == ["after", 1, -1]


def test_the_weights_can_be_taken_out_by_deepspeeds_tool(saving: Ran) -> None:
    """They are the optimizer's fp32 weights bit by bit, not the rounded ones of the model."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = torch.load(saving.folder / MASTERS, weights_only=True)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(saving.folder / "ours"))
    assert weights.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(weights[name], expected[name])]
    assert not different
    assert any(not torch.equal(w, w.bfloat16().float()) for w in expected.values())


def test_a_rank_that_died_is_named(deepspeed_server: WarmHost, tmp_path: Path) -> None:
    notes = Ran(deepspeed_server, tmp_path, "dead").notes()
    assert notes["raised"].startswith("ControlPlaneError: ranks [1] did not report within 2 s")
    assert notes["latest"] == ""


def test_every_node_has_latest_in_its_own_storage(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    ran = Ran(deepspeed_server, tmp_path, "node_local")
    for rank in (0, 1):
        assert ran.notes(rank)["ours"] == "one" and ran.notes(rank)["loaded"]
