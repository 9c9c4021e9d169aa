"""Where an unchanged script starts from, and what is said before its first step."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from megatron_ft.core.environment import RESTORE
from tests.support.deepspeed_cells import zero
from tests.support.late_capture import LOAD_FROM, NO_OFFER, SAVE_AT, SAVE_TO
from tests.support.warm_host import Outcome, Request, WarmHost

pytestmark = pytest.mark.deepspeed

RANKS, SNAPSHOT_AT = 2, 4
CONFIG = zero(2, "bf16")
ON = {"enabled": True, "snapshot_interval": 2, "protect": "none"}


@dataclass
class Incarnation:
    """What became of one run of the script: its output, and what each rank has seen."""

    outcome: Outcome
    seen: list[dict[str, Any]]

    @property
    def losses(self) -> list[dict[str, list[str]]]:
        return [seen["losses"] for seen in self.seen]

    @property
    def error(self) -> str:
        """The error of the first rank, the same kind on all."""
        assert len({seen["error"].partition(":")[0] for seen in self.seen}) == 1
        return str(self.seen[0]["error"])


@dataclass
class Script:
    """Runs the script in ``folder``; it saves and loads in ``saved``, or in there."""

    server: WarmHost
    folder: Path
    saved: Path | None = None

    @property
    def checkpoints(self) -> str:
        return str(self.saved or self.folder / "checkpoints")

    def run(self, name: str, section: Any = ON, ranks: int = RANKS, **told: Any) -> Incarnation:
        variables, base = told.pop("variables", {}), told.pop("base", CONFIG)
        folder = self.folder / name
        folder.mkdir(parents=True)
        config = base if section is None else {**base, "inmem_snapshot": section}
        request = Request(
            entry="tests.programs.deepspeed_script_flow:run",
            argv=[json.dumps({"config": config, **told}), str(folder)],
            ranks=ranks,
            logs=str(folder / "logs"),
            timeout_seconds=100,
            environment={SAVE_TO: str(folder / "arenas")}
            | {key: str(value) for key, value in variables.items()},
        )
        outcome = self.server.run(request)
        assert not any(outcome.codes), outcome.story()
        return Incarnation(
            outcome, [json.loads((folder / f"seen{r}.json").read_text()) for r in range(ranks)]
        )

    def load(self, **more: Any) -> list[dict[str, Any]]:
        """What a script gives load_checkpoint."""
        return [{"load_dir": self.checkpoints, **more}]


@pytest.fixture(scope="module")
def first_incarnation(
    deepspeed_server: WarmHost, tmp_path_factory: Any
) -> tuple[Script, Incarnation]:
    """Six steps: checkpoints of steps 2 and 6, a snapshot of step 4."""
    script = Script(deepspeed_server, tmp_path_factory.mktemp("first"))
    saves = {
        at: [{"save_dir": script.checkpoints, "client_state": {"step": int(at), "epoch": 0}}]
        for at in ("2", "6")
    }
    saves["2"].insert(0, {"save_dir": script.checkpoints, "tag": "best", "save_latest": False})
    incarnation = script.run(
        "incarnation", loads=script.load(), saves=saves, steps=6, variables={SAVE_AT: SNAPSHOT_AT}
    )
    assert incarnation.seen[0]["loads"] == [[None, {}]] and incarnation.seen[0]["begins_at"] == 0
    shutil.copytree(script.checkpoints, script.folder / "as they were")
    return script, incarnation


@pytest.fixture
def script(first_incarnation: tuple[Script, Incarnation], tmp_path: Path) -> Script:
    """The script of another incarnation, with the checkpoints of the first one where they were."""
    before, _ = first_incarnation
    shutil.rmtree(before.checkpoints)
    shutil.copytree(before.folder / "as they were", before.checkpoints)
    return Script(before.server, tmp_path, Path(before.checkpoints))


DECLARED = {**ON, "client_state": {"step": "global_steps", "epoch": "constant"}}
FOLLOWS = {**ON, "follows_engine": True}


def only_step_2(script: Script) -> None:
    """As if training had died before the checkpoint of step 6."""
    shutil.rmtree(Path(script.checkpoints, "global_step6"))
    Path(script.checkpoints, "latest").write_text("global_step2")


def after(script: Script, first: tuple[Script, Incarnation], **told: Any) -> Incarnation:
    """An incarnation that is offered the first one's snapshot."""
    given = {"section": DECLARED, "steps": 2, "loads": script.load(), **told}
    variables = {LOAD_FROM: first[0].folder / "incarnation" / "arenas", **told.pop("variables", {})}
    return script.run("after", **{**given, "variables": variables})


def test_memory_is_taken_if_it_is_newer(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    only_step_2(script)
    incarnation = after(script, first_incarnation)
    for seen, losses in zip(incarnation.seen, first_incarnation[1].losses, strict=True):
        assert seen["begins_at"] == SNAPSHOT_AT
        assert seen["losses"] == {at: losses[at] for at in ("5", "6")}
        assert seen["loads"] == [["", {"step": 4, "epoch": 0}]]
    said = incarnation.outcome.output(0)
    assert "starting from memory: newer than what is on disk (iteration 2)" in said
    assert "restored the in-memory snapshot of step 4" in said


def test_the_disk_is_taken_if_it_is_newer(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    incarnation = after(script, first_incarnation)
    assert [seen["begins_at"] for seen in incarnation.seen] == [6, 6]
    assert incarnation.seen[0]["loads"] == [["global_step6", {"step": 6, "epoch": 0}]]
    said = incarnation.outcome.output(0)
    assert "starting from disk: the checkpoint of iteration 6 is newer" in said


def test_a_checkpoint_that_is_newly_asked_for_is_taken(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    incarnation = after(script, first_incarnation, loads=script.load(tag="best"))
    assert incarnation.seen[0]["begins_at"] == 2
    assert "starting from disk: the checkpoint 'best' was asked for" in incarnation.outcome.output(
        0
    )


def test_a_folder_that_is_newly_named_is_taken(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    """What is newest there is another checkpoint, even if it has the same tag."""
    only_step_2(script)
    shutil.copytree(script.checkpoints, script.folder / "moved")
    incarnation = after(
        script, first_incarnation, loads=[{"load_dir": str(script.folder / "moved")}]
    )
    assert incarnation.seen[0]["begins_at"] == 2
    said = incarnation.outcome.output(0)
    assert "starting from disk: the checkpoint 'global_step2' in" in said


def test_a_script_that_loads_nothing_is_told_so_and_gets_no_snapshot(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    """Its first batch is read before its first forward, so it cannot continue bit by bit."""
    incarnation = after(script, first_incarnation, loads=())
    assert "without calling engine.load_checkpoint: call it at every start" in incarnation.error
    assert not incarnation.losses[0]
    fresh = script.run("fresh", FOLLOWS, loads=(), ranks=1)
    said = fresh.outcome.output(0)
    assert "a restart of this job will be refused: the script trains without calling" in said
    assert "`loader = deepspeed_ext.ResumableLoader(loader)`" in said


PIPELINE = {**zero(1, "bf16"), "pipeline": {"activation_checkpoint_interval": 0}}


@pytest.mark.parametrize(
    ("reads", "base"),
    [("engine", CONFIG), pytest.param("pipeline", PIPELINE, marks=pytest.mark.all_layouts)],
)
def test_a_script_that_loads_nothing_continues_where_its_data_are_watched(
    deepspeed_server: WarmHost, tmp_path: Path, reads: str, base: dict[str, Any]
) -> None:
    """In the middle of a pass, bit by bit."""
    script, told = Script(deepspeed_server, tmp_path), {"reads": reads, "base": base}
    first = script.run("first", FOLLOWS, **told, steps=6, variables={SAVE_AT: SNAPSHOT_AT})
    assert "will be refused" not in first.outcome.output(0)
    offered = {LOAD_FROM: tmp_path / "first" / "arenas"}
    again = script.run("again", FOLLOWS, **told, steps=2, variables=offered)
    assert "restored the in-memory snapshot of step 4" in again.outcome.output(0)
    assert again.losses == [{at: losses[at] for at in ("5", "6")} for losses in first.losses]
    newer = Path(script.checkpoints, "global_step5")
    newer.mkdir(parents=True)
    (newer.parent / "latest").write_text(newer.name)
    late = script.run("late", FOLLOWS, **told, peeks=True, loads=script.load(), variables=offered)
    assert "a batch or a counter was read, and the in-memory snapshot" in late.error


WARMS_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
COUNTED = ("counter", "samples", "skipped", "rate", "schedule", "rank 0 alone")
"""What the script reads first."""


@pytest.mark.parametrize(
    ("stage", "first_read"),
    [
        (2, "counter"),
        *(
            pytest.param(stage, first_read, marks=pytest.mark.all_layouts)
            for stage in range(4)
            for first_read in COUNTED
            if (stage, first_read) != (2, "counter")
        ),
    ],
)
def test_the_first_read_of_a_counter_restores(
    deepspeed_server: WarmHost, tmp_path: Path, stage: int, first_read: str
) -> None:
    """Else a script that was killed behind its last step would train one step more."""
    script, base = Script(deepspeed_server, tmp_path), {**zero(stage, "bf16"), **WARMS_UP}
    told = {"reads": "engine", "base": base, "until": SNAPSHOT_AT, "first_read": first_read}
    first = script.run("first", FOLLOWS, **told, variables={SAVE_AT: SNAPSHOT_AT, RESTORE: "disk"})
    offered = {LOAD_FROM: tmp_path / "first" / "arenas", RESTORE: "memory"}
    again = script.run("again", FOLLOWS, **told, variables=offered)
    assert again.outcome.output(0).count("restored the in-memory snapshot of step 4") == 1
    assert again.losses == [{}, {}], "no step was left"
    for before, after in zip(first.seen, again.seen, strict=True):
        assert after["ends_as"] == before["ends_as"]
        assert after["watched"] is False
    if first_read == "rank 0 alone":
        assert [seen["first_read"] for seen in again.seen] == [0, None]
        assert "Read it on all ranks" in again.outcome.output(0)
    else:
        assert [seen["first_read"] for seen in again.seen] == [
            seen["first_read_at_end"] for seen in first.seen
        ]
    further = script.run("further", FOLLOWS, **{**told, "until": 6}, variables=offered)
    assert [list(losses) for losses in further.losses] == [["5", "6"]] * 2


def test_a_script_that_goes_on_after_errors_trains_nothing_else(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    """Many skip a batch that failed; what failed here would fail, or do harm, in every other."""
    incarnation = after(script, first_incarnation, loads=(), goes_on=True, steps=3)
    assert not incarnation.losses[0] and len(incarnation.seen[0]["errors"]) == 3


def test_a_second_load_before_training_changes_nothing(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    """Else the weights would be the checkpoint's, and position and generators the snapshot's."""
    only_step_2(script)
    incarnation = after(script, first_incarnation, loads=script.load() * 2)
    assert incarnation.seen[0]["loads"] == [["", {"step": 4, "epoch": 0}]] * 2
    assert incarnation.seen[0]["begins_at"] == SNAPSHOT_AT
    assert incarnation.losses[0] == {at: first_incarnation[1].losses[0][at] for at in ("5", "6")}
    assert f"not loading {script.checkpoints}: the in-memory" in incarnation.outcome.output(0)


def test_a_load_in_the_middle_of_training_waits_for_a_running_capture(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    back = {str(SNAPSHOT_AT): script.load(tag="best")}
    told = {"section": DECLARED, "loads": script.load(), "steps": 5, "reloads": back}
    Path(script.checkpoints, "latest").unlink()
    script.run("back", **told, variables={SAVE_AT: SNAPSHOT_AT})
    only_step_2(script)
    incarnation = after(
        script, first_incarnation, variables={LOAD_FROM: script.folder / "back" / "arenas"}
    )
    assert incarnation.seen[0]["begins_at"] == SNAPSHOT_AT
    assert incarnation.losses[0] == {at: first_incarnation[1].losses[0][at] for at in ("5", "6")}


def test_a_second_engine_with_the_section_is_refused_as_it_is_made(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    script = Script(deepspeed_server, tmp_path)
    incarnation = script.run("two", ranks=1, second_engine="same")
    assert "the engine of Small is the second one in this process" in incarnation.error
    assert not incarnation.losses[0] and "others" not in incarnation.seen[0]
    incarnation = script.run("used", ranks=1, loads=script.load(), second_engine="same", destroys=1)
    assert "the engine of Small is the second one in this process" in incarnation.error
    incarnation = script.run("unused", ranks=1, second_engine="same", destroys=1)
    assert incarnation.losses[0] and incarnation.seen[0]["others"] == ["load_checkpoint", "step"]


def test_an_engine_beside_the_one_with_the_section_is_left_alone(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    incarnation = Script(deepspeed_server, tmp_path).run("two", ranks=1, second_engine="plain")
    assert incarnation.losses[0] and incarnation.seen[0]["others"] == []


def test_loading_weights_alone_is_no_resumption(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    only_step_2(script)
    weights = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    loads = [*script.load(load_module_only=True), *script.load(**weights), *script.load()]
    incarnation = after(script, first_incarnation, loads=loads)
    first, second, third = incarnation.seen[0]["loads"]
    assert (first[0], second[0], third[0]) == ("global_step2", "global_step2", "")
    assert incarnation.losses[0] == {at: first_incarnation[1].losses[0][at] for at in ("5", "6")}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({NO_OFFER: 1}, "ranks [1] were not offered the snapshot of iteration 4"),
        ({RESTORE: "disk"}, "the job decided to start from disk"),
    ],
)
def test_all_ranks_take_memory_or_none_does(
    script: Script,
    first_incarnation: tuple[Script, Incarnation],
    variables: dict[str, Any],
    said: str,
) -> None:
    only_step_2(script)
    incarnation = after(script, first_incarnation, variables=variables)
    assert [seen["begins_at"] for seen in incarnation.seen] == [2, 2]
    assert f"starting from disk: {said}" in incarnation.outcome.output(0)


def test_a_client_state_of_another_step_is_not_handed_out(
    script: Script, first_incarnation: tuple[Script, Incarnation]
) -> None:
    only_step_2(script)
    incarnation = after(script, first_incarnation, section=ON)
    assert incarnation.seen[0]["loads"] == [["global_step2", {"step": 2, "epoch": 0}]]
    said = incarnation.outcome.output(0)
    assert "starting from disk: the script gave its client_state at step 2" in said
    assert '"client_state": {' in said and "set_client_state" in said
    warned = (first_incarnation[0].folder / "incarnation" / "logs" / "rank0.log").read_text()
    assert "snapshots after step 2 will not be used for a restart" in warned


@pytest.fixture(scope="module")
def unsaved_incarnation(
    first_incarnation: tuple[Script, Incarnation], tmp_path_factory: Any
) -> tuple[Script, Incarnation]:
    """Two steps from the checkpoint "best" of step 2; nothing saved, a snapshot of step 4."""
    script = Script(first_incarnation[0].server, tmp_path_factory.mktemp("unsaved"))
    shutil.copytree(first_incarnation[0].folder / "as they were", script.checkpoints)
    told = {"loads": script.load(tag="best"), "steps": 2, "variables": {SAVE_AT: SNAPSHOT_AT}}
    return script, script.run("incarnation", ON, **told)


def go_on(
    incarnation: tuple[Script, Incarnation], folder: Path, section: Any, **told: Any
) -> Incarnation:
    """Start the script again; it is offered the snapshot of that incarnation."""
    arenas = incarnation[0].folder / "incarnation" / "arenas"
    told = {"loads": incarnation[0].load(tag="best"), "steps": 1, **told}
    return Script(incarnation[0].server, folder).run(
        "after", section, **told, variables={LOAD_FROM: arenas}
    )


def test_a_script_that_promises_nothing_starts_from_disk(
    unsaved_incarnation: tuple[Script, Incarnation], tmp_path: Path
) -> None:
    said = unsaved_incarnation[1].outcome.output(0)
    assert said.count("warning: a restart of this job will use no snapshot: it is unknown") == 1
    incarnation = go_on(unsaved_incarnation, tmp_path, ON)
    assert [seen["begins_at"] for seen in incarnation.seen] == [2, 2]
    said = incarnation.outcome.output(0)
    assert "starting from disk: it is unknown whether the script follows the engine's step" in said
    assert 'add "follows_engine": true' in said


def test_the_promise_is_enough(
    unsaved_incarnation: tuple[Script, Incarnation], tmp_path: Path
) -> None:
    incarnation = go_on(unsaved_incarnation, tmp_path, FOLLOWS)
    assert [seen["begins_at"] for seen in incarnation.seen] == [SNAPSHOT_AT] * 2
    said = incarnation.outcome.output(0)
    assert (
        "the checkpoint 'best' was loaded in an earlier incarnation" in said
        and "no snapsh" not in said
    )


def test_a_script_that_neither_loads_nor_promises_is_refused(
    unsaved_incarnation: tuple[Script, Incarnation], tmp_path: Path
) -> None:
    """Unless it says that it does not follow the engine: then it starts from scratch."""
    told = {"loads": (), "steps": 2}
    refused = go_on(unsaved_incarnation, tmp_path / "refused", ON, **told)
    assert "a snapshot of step 4 is in memory, and this start would begin at" in refused.error
    assert 'add "follows_engine": true' in refused.error and "call it at every" in refused.error
    assert not refused.losses[0] and "starting from scratch" not in refused.outcome.output(0)
    section = {**ON, "follows_engine": False}
    incarnation = go_on(unsaved_incarnation, tmp_path / "anew", section, **told)
    assert sorted(incarnation.losses[0]) == ["1", "2"] and "error" not in incarnation.seen[0]
    said = incarnation.outcome.output(0)
    assert "warning: starting from scratch, not from the snapshot of step 4: it is unknown" in said


def test_a_tag_in_another_folder_is_another_checkpoint(
    unsaved_incarnation: tuple[Script, Incarnation], tmp_path: Path
) -> None:
    """Accelerate, for one, saves them all with one tag."""
    shutil.copytree(unsaved_incarnation[0].checkpoints, tmp_path / "moved")
    named = {"load_dir": str(tmp_path / "moved"), "tag": "best"}
    incarnation = go_on(unsaved_incarnation, tmp_path, FOLLOWS, loads=[named])
    assert [seen["begins_at"] for seen in incarnation.seen] == [2, 2]
    assert "starting from disk: the checkpoint 'best' was asked for" in incarnation.outcome.output(
        0
    )


def test_a_schedule_outside_the_engine_keeps_memory_from_serving(
    first_incarnation: tuple[Script, Incarnation], tmp_path: Path
) -> None:
    """It is made behind the load, so the next start knows of it from the snapshot."""
    script = Script(first_incarnation[0].server, tmp_path)
    told = {"loads": script.load(), "steps": 4, "schedule": True}
    first = script.run("incarnation", FOLLOWS, **told, variables={SAVE_AT: SNAPSHOT_AT})
    assert "will use no snapshot: no snapshot holds the state of a learning rate scheduler" in (
        first.outcome.output(0)
    )
    again = {"loads": script.load(), "variables": {LOAD_FROM: tmp_path / "incarnation" / "arenas"}}
    incarnation = script.run("after", FOLLOWS, schedule=True, **again)
    assert "would begin at step 0: no snapshot holds the state of" in incarnation.error


def test_an_engine_without_the_section_is_left_alone(deepspeed_server: Any, tmp_path: Path) -> None:
    for name, section in (("none", None), ("off", {"enabled": False})):
        incarnation = Script(deepspeed_server, tmp_path).run(name, section, ranks=1)
        assert incarnation.seen[0]["replaced"] == [] and "error" not in incarnation.seen[0]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"section": {**ON, "protection": "xor:2"}},
            'ConfigError: the DeepSpeed config: inmem_snapshot has an unknown key "protection"; '
            "did you mean protect?",
        ),
        (
            {"section": {**ON, "slots": 2.0}},
            "ConfigError: the DeepSpeed config: inmem_snapshot.slots is 2.0; give 2, 3 or auto",
        ),
        (
            {"section": ON, "model": "with_8_bits"},
            "optimizer: the optimizer tests.programs.deepspeed_models.Adam8bit is not known",
        ),
        ({"section": ON, "plugins": ["late_hook"]}, "was made before deepspeed_ext was imported"),
        ({"section": ON, "plugins": ["old_release"]}, "DeepSpeed 0.17.6 is too old"),
        (
            {"section": ON, "plugins": ["renamed_parameter"]},
            "no parameter 'load_dir' of deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint",
        ),
        (
            {
                "section": {**ON, "protect": "xor:2"},
                "variables": {"MEGATRON_FT_JOB": "job", "MEGATRON_FT_PROTECT": "rs:3+1"},
            },
            "inmem_snapshot.protect is xor:2, but the supervisor's --protect is rs:3+1",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(
    deepspeed_server: WarmHost, tmp_path: Path, told: dict[str, Any], said: str
) -> None:
    incarnation = Script(deepspeed_server, tmp_path).run("refused", ranks=1, **told)
    assert said in incarnation.error and not incarnation.seen[0]["losses"]


@pytest.mark.parametrize("plugin", ["old_release", "renamed_parameter"])
def test_an_unsupported_release_trains_without_the_section(
    deepspeed_server: WarmHost, tmp_path: Path, plugin: str
) -> None:
    incarnation = Script(deepspeed_server, tmp_path).run("plain", None, ranks=1, plugins=[plugin])
    assert "error" not in incarnation.seen[0] and incarnation.seen[0]["losses"]
