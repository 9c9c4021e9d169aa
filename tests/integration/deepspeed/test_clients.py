"""Transformers' Trainer, Accelerate and Lightning: what they resume is right, or refused.

They are the real libraries; models are made from a configuration.  The SMP is the test's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("deepspeed", "transformers", "accelerate", "lightning")
if missing := [name for name in LIBRARIES if find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)

from tests.programs.clients_program import ENVIRONMENT  # noqa: E402
from tests.support.late_capture import LOAD_FROM, SAVE_AT, SAVE_TO  # noqa: E402
from tests.support.warm_host import Request, WarmHost  # noqa: E402

pytestmark = pytest.mark.deepspeed


@dataclass
class Incarnation:
    """What the ranks have seen, and what rank 0 has said."""

    folder: Path
    seen: list[dict[str, Any]]
    said: str

    @property
    def losses(self) -> dict[str, Any]:
        return dict(self.seen[0]["losses"])


@dataclass
class Client:
    """Runs one client in ``folder``."""

    server: WarmHost
    folder: Path
    entry: str
    ranks: int = 2

    def run(self, name: str, variables: dict[str, Any] | None = None, **told: Any) -> Incarnation:
        folder = self.folder / name
        folder.mkdir()
        request = Request(
            entry="tests.programs.clients_program:main",
            argv=[self.entry, json.dumps(told), str(folder)],
            ranks=self.ranks,
            logs=str(folder / "logs"),
            timeout_seconds=100,
            environment={SAVE_TO: str(folder / "arenas")}
            | {key: str(value) for key, value in (variables or {}).items()},
        )
        outcome = self.server.run(request)
        assert not any(outcome.codes), outcome.story()
        seen = [json.loads((folder / f"seen{r}.json").read_text()) for r in range(self.ranks)]
        return Incarnation(folder, seen, outcome.output(0))

    def again(self, before: Incarnation, **told: Any) -> Incarnation:
        """The next incarnation: it is offered the snapshot of the one before."""
        name = f"again{len(list(self.folder.glob('again*')))}"
        return self.run(name, {LOAD_FROM: before.folder / "arenas"}, **told)


@pytest.fixture(scope="module")
def server() -> Iterator[WarmHost]:
    """Its ranks have imported all clients."""
    server = WarmHost("tests.programs.clients_program", ENVIRONMENT)
    yield server
    server.close()


def test_a_trainer_resumes_from_its_checkpoint_not_from_memory(
    server: WarmHost, tmp_path: Path
) -> None:
    """The Trainer counts by its own checkpoint of step 2; the snapshot is of step 3."""
    client = Client(server, tmp_path, "trainer")
    output = str(tmp_path / "output")
    told: dict[str, Any] = {"output": output, "save_steps": 2, "section": {"follows_engine": True}}
    whole = client.run("whole", {SAVE_AT: 3}, steps=4, **told)
    assert (
        "a restart of this job will use no snapshot: no snapshot holds the state of" in whole.said
    )
    shutil.rmtree(Path(output, "checkpoint-4"))
    again = client.again(whole, steps=4, **told)
    assert "starting from disk: " in again.said
    assert [(seen["begins_at"], seen["engine"]) for seen in again.seen] == [(2, 4)] * 2
    assert again.losses == {at: whole.losses[at] for at in ("3", "4")}


def test_a_trainer_without_a_checkpoint_starts_from_scratch(
    server: WarmHost, tmp_path: Path
) -> None:
    """It loads nothing then, so every later start would end with one error."""
    client = Client(server, tmp_path, "trainer")
    told: dict[str, Any] = {"output": str(tmp_path / "output"), "save_steps": 100, "steps": 3}
    whole = client.run("whole", {SAVE_AT: 2}, **told)
    shutil.rmtree(told["output"])
    again = client.again(whole, **told)
    assert "warning: starting from scratch, not from the snapshot of step 2: " in again.said
    assert "transformers.Trainer" in again.said and "set_client_state" in again.said
    assert again.losses == whole.losses


def test_an_accelerator_gets_the_state_that_it_names(server: WarmHost, tmp_path: Path) -> None:
    """Every one of its checkpoints has the same tag, each in a folder of its own."""
    client = Client(server, tmp_path, "accelerator")
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


def test_accelerate_on_the_plain_interface(server: WarmHost, tmp_path: Path) -> None:
    client = Client(server, tmp_path, "plain_accelerator")
    whole = client.run("whole", {SAVE_AT: 3}, steps=5, wrap=True)
    again = client.again(whole, steps=5, wrap=True)
    assert again.losses == {at: whole.losses[at] for at in ("4", "5")}
    client = Client(server, tmp_path / "bare", "plain_accelerator")
    client.folder.mkdir()
    whole = client.run("whole", {SAVE_AT: 3}, steps=5)
    assert "accelerate.Accelerator" in whole.said
    again = client.again(whole, steps=5)
    assert again.seen[0]["begins_at"] == 3


def test_lightning_on_the_plain_interface_is_warned(server: WarmHost, tmp_path: Path) -> None:
    client = Client(server, tmp_path, "plain_lightning", ranks=1)
    whole = client.run("whole", {SAVE_AT: 2}, steps=3)
    assert "lightning.Trainer" in whole.said
    again = client.again(whole, steps=1)
    assert again.seen[0]["begins_at"] == 2 and "lightning.Trainer" in again.said
