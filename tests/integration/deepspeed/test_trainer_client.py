"""transformers.Trainer resumes from memory as if nothing had happened, or not at all.

Its scripts are unedited.  The SMP is the test's; jobs are in test_client_jobs.py.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("deepspeed", "transformers", "accelerate", "lightning")
if missing := [name for name in LIBRARIES if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

from tests.programs.clients_program import OPTIMIZER
from tests.support.client_runs import Client, check_identical
from tests.support.late_capture import NO_OFFER, SAVE_AT
from tests.support.warm_host import WarmHost

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]
all_layouts = pytest.mark.all_layouts

_AUTO = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
WARMUP = {"type": "WarmupDecayLR", "params": dict.fromkeys(_AUTO, "auto")}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {},
    "ZeRO 2, own optimizer and schedule": {"stage": 2, "json": {}},
    "ZeRO 3": {"stage": 3},
    "ZeRO 3, no checkpoints": {"stage": 3, "arguments": {"save_strategy": "no"}, "resume": None},
    "schedule in the JSON": {"json": {"optimizer": OPTIMIZER, "scheduler": WARMUP}},
    "sums of losses": {"arguments": {"logging_steps": 4}},
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}, "at": 7},
    "a short last step": {"arguments": {"gradient_accumulation_steps": 2}, "samples": 34, "at": 6},
    "a later pass": {"at": 13, "steps": 24, "stage": 2},
    "between passes": {"at": 10, "steps": 12},
    "workers": {"arguments": {"dataloader_num_workers": 2}},
    "a stream": {"unsized": True},
    "the best model": {"arguments": BEST, "early": True, "at": 3},
    "asks for the newest": {},
    "never asks": {"resume": None},
}
ASKS = "asks for the newest"
QUICK = ("a later pass",)


def told(folder: Path, **more: Any) -> dict[str, Any]:
    return {"output": str(folder / "output"), "save_steps": 2, "steps": 8, **more}


def lost_behind(folder: Path, step: int) -> None:
    """Remove the checkpoints that were saved behind a step."""
    for path in folder.glob("output/checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in QUICK else all_layouts) for name in VARIANTS]
)
def test_a_trainer_continues_from_memory(
    clients_server: WarmHost, tmp_path: Path, variant: str
) -> None:
    given = dict(VARIANTS[variant])
    at = given.pop("at", 5)
    client, given = Client(clients_server, tmp_path, "trainer"), told(tmp_path, **given)
    whole = client.run("whole", {SAVE_AT: at}, **given)
    assert "will use no snapshot" not in whole.said
    lost_behind(tmp_path, at)
    again = client.again(whole, **given, **({"resume": True} if variant == ASKS else {}))
    assert "starting from memory: " in again.said, again.said
    assert f"restored the in-memory snapshot of step {at} " in again.said
    check_identical(whole, again, at, "logs", "loss", "flos", "engine")


@all_layouts
def test_a_newer_checkpoint_serves(clients_server: WarmHost, tmp_path: Path) -> None:
    client, given = Client(clients_server, tmp_path, "trainer"), told(tmp_path)
    whole = client.run("whole", {SAVE_AT: 3}, **given)
    lost_behind(tmp_path, 4)
    again = client.again(whole, **given)
    assert "starting from disk: the checkpoint 'global_step4' in " in again.said
    assert [seen["begins_at"] for seen in again.seen] == [4, 4]
    assert again.losses == {at: whole.losses[at] for at in map(str, range(5, 9))}


@all_layouts
def test_a_rank_without_its_part_sends_all_to_disk(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    client, given = Client(clients_server, tmp_path, "trainer"), told(tmp_path)
    whole = client.run("whole", {SAVE_AT: 5}, **given)
    lost_behind(tmp_path, 4)
    again = client.again(whole, {NO_OFFER: "1"}, **given)
    assert "starting from disk: ranks [1] were not offered" in again.said
    assert [seen["begins_at"] for seen in again.seen] == [4, 4]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "random batches": ({"draws": True}, "draws random numbers in the training process"),
    "ignore_data_skip": ({"arguments": {"ignore_data_skip": True}}, "begin its data anew"),
    "a second stream": ({"unsized": True, "at": 11}, "how many steps a pass"),
}


@pytest.mark.parametrize("reason", [pytest.param(name, marks=all_layouts) for name in REFUSED])
def test_what_cannot_be_exact_comes_from_disk(
    clients_server: WarmHost, tmp_path: Path, reason: str
) -> None:
    (more, text), client = REFUSED[reason], Client(clients_server, tmp_path, "trainer")
    given = told(tmp_path, **{**more, "steps": 13})
    at = given.pop("at", 5)
    whole = client.run("whole", {SAVE_AT: at}, **given)
    assert "a restart of this job will use no snapshot: " in whole.said and text in whole.said
    lost_behind(tmp_path, at)
    again = client.again(whole, **given)
    assert "starting from disk: " in again.said and text in again.said
