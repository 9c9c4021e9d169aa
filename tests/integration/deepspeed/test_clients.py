"""Accelerate and Lightning: what they resume is right, or refused.

They are the real libraries; models are made from a configuration.  The SMP is the test's.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("deepspeed", "transformers", "accelerate", "lightning")
if missing := [name for name in LIBRARIES if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

from tests.programs.clients_program import BATCH
from tests.support.client_runs import Client, check_identical
from tests.support.late_capture import SAVE_AT
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.deepspeed
all_layouts = pytest.mark.all_layouts


@pytest.mark.all_layouts
def test_an_accelerator_gets_the_state_that_it_names(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    """Every one of its checkpoints has the same tag, each in a folder of its own."""
    client = Client(clients_server, tmp_path, "accelerator")
    told: dict[str, Any] = {"stage": 2, "section": {"follows_engine": True}}
    client.run("first", steps=4, saves=[2, 4], **told)
    before = client.run("before", {SAVE_AT: 5}, steps=5, load=str(tmp_path / "step2"), **told)
    for saved in (4, 2):
        given = {"steps": saved + 2, "load": str(tmp_path / f"step{saved}"), **told}
        alone = client.run(f"alone{saved}", **given)
        again = client.again(before, **given)
        assert [seen["engine"] for seen in again.seen] == [saved] * 2
        assert again.losses == alone.losses and len(again.losses) == 2
        assert "starting from disk: " in again.said and "accelerate.Accelerator" in alone.said


ACCELERATORS: dict[str, dict[str, Any]] = {
    "in a later pass": {"at": 13, "stage": 1},
    "between passes": {"at": 10, "stage": 2, "numbered": True},
    "seeded": {"at": 14, "stage": 3, "seeds": True, "numbered": True},
    "accumulation": {"at": 6, "stage": 2, "accumulate": 2},
    "ddp": {"at": 6, "plugin": "ddp", "accumulate": 2, "steps": 9},
    "ddp between passes": {"at": 10, "plugin": "ddp", "numbered": True, "seeds": True},
    "ddp seeded": {"at": 14, "plugin": "ddp", "seeds": True},
    "ddp dispatching": {"at": 13, "plugin": "ddp", "loaders": {"dispatch_batches": True}},
    "ddp stream": {"at": 13, "plugin": "ddp", "unsized": True},
    "ddp end of a stream": {
        "at": 10,
        "plugin": "ddp",
        "unsized": True,
        "loaders": {"dispatch_batches": False},
    },
    "fsdp2": {"at": 8, "plugin": "fsdp2", "steps": 13},
    "fsdp2 accumulation": {"at": 6, "plugin": "fsdp2", "accumulate": 2},
}
IN_CI = ("seeded", "ddp", "fsdp2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_CI else all_layouts) for n in ACCELERATORS]
)
def test_an_accelerator_continues_from_memory(
    clients_server: WarmHost, tmp_path: Path, name: str
) -> None:
    given = {"plugin": "deepspeed", "steps": 24, **ACCELERATORS[name]}
    at = given.pop("at")
    client = Client(clients_server, tmp_path, "accelerator_in_memory")
    whole = client.run("whole", {SAVE_AT: at}, **given)
    assert "will use no snapshot" not in whole.said and "of its own" not in whole.said
    assert "a restart loses" not in whole.said
    again = client.again(whole, **given)
    assert f"the in-memory snapshot of step {at} " in again.said or (
        f"restored iteration {at} " in again.said
    )
    check_identical(whole, again, at)
    if "loaders" not in given:
        # Used batches are skipped, but for the last one; one is read ahead.
        left = (given["steps"] - at) * given.get("accumulate", 1)
        assert again.seen[0]["reads"] <= (left + 2) * BATCH


@all_layouts
def test_a_newer_checkpoint_of_an_accelerator_goes_before_memory(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    """It knows the place in the data as well; the next one gets a name that is free."""
    client = Client(clients_server, tmp_path, "accelerator_in_memory")
    told: dict[str, Any] = {"plugin": "ddp", "steps": 16, "project": str(tmp_path / "project")}
    whole = client.run("whole", {SAVE_AT: 3}, saves=[13], **told)
    saved = tmp_path / "project" / "checkpoints"
    again = client.again(whole, saves=[15], load=str(saved / "checkpoint_0"), **told)
    check_identical(whole, again, 13)
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint_0", "checkpoint_1"]


@all_layouts
def test_batches_that_are_made_by_chance_are_refused(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    client = Client(clients_server, tmp_path, "accelerator_in_memory")
    told: dict[str, Any] = {"plugin": "deepspeed", "steps": 6, "stage": 1, "draws": True}
    whole = client.run("whole", {SAVE_AT: 4}, **told)
    assert "a restart of this job will use no snapshot: reading its data draws" in whole.said
    again = client.again(whole, **told)
    assert "warning: starting from scratch, not from the snapshot of step 4: " in again.said
    assert again.losses == whole.losses


@all_layouts
def test_an_accelerator_that_does_not_ask_gets_nothing(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    """Its own way to load would bring back all but the engine from another step."""
    told: dict[str, Any] = {"stage": 1, "section": {"follows_engine": True}}
    Client(clients_server, tmp_path, "accelerator").run("first", steps=4, saves=[2], **told)
    asking = Client(clients_server, tmp_path, "accelerator_in_memory")
    whole = asking.run("whole", {SAVE_AT: 4}, plugin="deepspeed", steps=6, stage=1)
    load = str(tmp_path / "step2")
    again = Client(clients_server, tmp_path, "accelerator").again(whole, steps=4, load=load, **told)
    assert "starting from disk: " in again.said
    assert [seen["engine"] for seen in again.seen] == [2, 2]


def test_accelerate_on_the_plain_interface_is_warned(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    client = Client(clients_server, tmp_path, "plain_accelerator")
    whole = client.run("whole", {SAVE_AT: 3}, steps=5)
    assert "accelerate.Accelerator" in whole.said
    again = client.again(whole, steps=5)
    assert again.seen[0]["begins_at"] == 3


def test_lightning_on_the_plain_interface_is_warned(
    clients_server: WarmHost, tmp_path: Path
) -> None:
    client = Client(clients_server, tmp_path, "plain_lightning", ranks=1)
    whole = client.run("whole", {SAVE_AT: 2}, steps=3)
    assert "lightning.Trainer" in whole.said
    again = client.again(whole, steps=1)
    assert again.seen[0]["begins_at"] == 2 and "lightning.Trainer" in again.said
