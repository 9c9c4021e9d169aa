"""Where a run starts from, what Megatron's flags change about it, and what is refused."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.checkpoint import native as start
from megatron_ft.core.environment import RESTORE


@pytest.mark.parametrize(
    ("tracker", "settings", "expected"),
    [
        ("120", {}, start.DiskStart(120)),
        (None, {}, start.DiskStart(-1)),
        ("release", {}, start.DiskStart(0)),
        ("120", {"finetune": True}, start.DiskStart(0)),
        ("120", {"ckpt_step": 40}, start.DiskStart(40, "--ckpt-step 40")),
        (
            "120",
            {"override_ckpt_iteration": 40},
            start.DiskStart(40, "--override-ckpt-iteration 40"),
        ),
        ("120", {"override_ckpt_iteration": 0}, start.DiskStart(0, "--override-ckpt-iteration 0")),
        (None, {"override_ckpt_iteration": 40}, start.DiskStart(-1)),
        (
            "120",
            {"ckpt_step": 90, "override_ckpt_iteration": 40},
            start.DiskStart(40, "--ckpt-step 90 --override-ckpt-iteration 40"),
        ),
        ("120", {"load": None}, start.DiskStart(-1)),
        ("120", {"load": None, "pretrained_checkpoint": "elsewhere"}, start.DiskStart(0)),
    ],
)
def test_what_megatron_would_load(
    tmp_path: Path, tracker: str | None, settings: dict[str, Any], expected: start.DiskStart
) -> None:
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker + "\n")
    assert start.disk_of(SimpleNamespace(**({"load": str(tmp_path)} | settings))) == expected


def test_a_wish_without_another_iteration_is_that_of_earlier_releases() -> None:
    """Else the next release would load the named checkpoint again, and lose what came after."""
    assert start.wish_of(SimpleNamespace()) == (None,)
    assert start.wish_of(SimpleNamespace(ckpt_step=5, override_ckpt_iteration=None)) == (5,)
    overriding = SimpleNamespace(ckpt_step=None, override_ckpt_iteration=0)
    assert start.wish_of(overriding) == (None, 0)


if find_spec("megatron") is None or find_spec("megatron.training") is None:
    pytest.skip("needs megatron-core with megatron.training", allow_module_level=True)

from megatron_ft.checkpoint.native import TRACKER, checkpoint_folder
from megatron_ft.megatron.own_checkpoints import SAVING_NOTE
from tests.support.late_capture import LOAD_FROM, SAVE_AT
from tests.support.megatron_layouts import Layout, words
from tests.support.megatron_programs import EXTERNAL, program
from tests.support.megatron_runs import ITERATIONS, SNAPSHOT_AT, SNAPSHOTS, Runs
from tests.support.warm_host import Outcome, WarmHost

# Megatron's own resume is exact only if data loaders leave the generator of dropout alone.
DP2 = program("dp2", plugin="quiet_data_loaders")
# What Megatron loads from disk leaves a ``step`` in the groups, which torch's Adam ignores.
GROUPS = "/groups/"
CHECKPOINTS = words("--save-interval 2 --ckpt-format torch_dist")


@pytest.fixture(scope="module")
def job(
    megatron_server: WarmHost, megatron_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """A run with a snapshot of iteration 4 and checkpoints of 2, 4, 6 and 8; tests add to it."""
    job = Runs(megatron_server, tmp_path_factory.mktemp("job"), megatron_corpus)
    disk = str(job.folder / "disk")
    job.train(DP2, "whole", SNAPSHOTS, "--save", disk, *CHECKPOINTS, **{SAVE_AT: SNAPSHOT_AT})
    return job


def set_tracker(runs: Runs, iteration: int) -> str:
    """Make Megatron find this checkpoint as the newest; the folder."""
    folder = runs.folder / "disk"
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(folder)


def resume(runs: Runs, earlier: str, name: str, *flags: str, **variables: object) -> Outcome:
    """The next incarnation after the run called ``earlier``."""
    arenas = runs.folder / earlier / "arenas"
    return runs.train(DP2, name, SNAPSHOTS, *flags, **{LOAD_FROM: arenas}, **variables)


def starts_at(runs: Runs, name: str) -> int:
    return min(runs.lines(name, 0)) - 1


@pytest.mark.megatron
@pytest.mark.slow
class TestTheSource:
    def test_memory_if_it_is_not_older_than_the_disk(self, job: Runs) -> None:
        for at, expected in ((2, 4), (4, 4), (6, 6)):
            name = f"disk{at}"
            after = resume(job, "whole", name, "--load", set_tracker(job, at))
            assert starts_at(job, name) == expected
            assert f"at iteration {expected}" in after.output(0)
            job.require_same(DP2, "whole", name, after=expected, but=GROUPS)

    def test_disk_for_all_if_one_rank_has_no_offer(self, job: Runs) -> None:
        load = ("--load", set_tracker(job, 2))
        after = resume(job, "whole", "partial", *load, TEST_NO_OFFER="1")
        assert "starting from disk: ranks [1] were not offered" in after.output(0)
        assert starts_at(job, "partial") == 2
        job.require_same(DP2, "whole", "partial", after=2, but=GROUPS)

    def test_disk_if_the_supervisor_says_so(self, job: Runs) -> None:
        load = ("--load", set_tracker(job, 2))
        resume(job, "whole", "told", *load, **{RESTORE: "disk"})
        assert starts_at(job, "told") == 2

    def test_finetuning_goes_on_and_does_not_begin_again(self, job: Runs) -> None:
        flags = ("--load", set_tracker(job, 8), "--finetune")
        first = job.train(DP2, "tuned", SNAPSHOTS, *flags, **{SAVE_AT: SNAPSHOT_AT})
        assert starts_at(job, "tuned") == 0 and "successfully loaded" in first.output(0)
        resume(job, "tuned", "again", *flags)
        assert starts_at(job, "again") == SNAPSHOT_AT
        job.require_same(DP2, "tuned", "again", after=SNAPSHOT_AT)

    def test_flags_about_the_first_load_do_not_change_a_restore(self, job: Runs) -> None:
        load = ("--load", set_tracker(job, 2), "--no-load-optim", "--no-load-rng")
        resume(job, "whole", "without", *load)
        job.require_same(DP2, "whole", "without", after=SNAPSHOT_AT)


@pytest.mark.megatron
@pytest.mark.slow
def test_a_named_checkpoint_is_loaded_once(job: Runs) -> None:
    """--ckpt-step is new to the job: disk, although memory is newer.  In the next incarnation of
    that run it is not new any more: memory."""
    flags = ("--load", set_tracker(job, 8), "--ckpt-step", "2")
    after = resume(job, "whole", "back", *flags, **{SAVE_AT: 6})
    assert "starting from disk: --ckpt-step 2 was asked for" in after.output(0)
    assert starts_at(job, "back") == 2
    job.require_same(DP2, "whole", "back", after=2, but=GROUPS)
    resume(job, "back", "next", *flags)
    assert starts_at(job, "next") == 6


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--override-opt_param-scheduler --lr-decay-iters 20 --lr-warmup-iters 5",
        "--use-checkpoint-opt_param-scheduler --lr-decay-iters 20 --lr-warmup-iters 5",
        "--override-opt_param-scheduler --global-batch-size 4 --train-iters 10 --seed 7",
    ],
    ids=lambda flags: "-".join(words(flags)[:2]),
)
def test_changed_flags_are_taken_as_megatron_does(job: Runs, flags: str) -> None:
    changed = words(flags)
    load = ("--load", set_tracker(job, SNAPSHOT_AT))
    flag = "-".join(changed[:2])
    disk, memory = f"disk{flag}", f"memory{flag}"
    job.train(DP2, disk, *load, *changed)
    resume(job, "whole", memory, *load, *changed)
    assert starts_at(job, memory) == starts_at(job, disk) == SNAPSHOT_AT
    job.require_same(DP2, disk, memory, after=SNAPSHOT_AT, but=GROUPS)


@pytest.mark.megatron
@pytest.mark.slow
def test_another_rate_is_taken_if_the_schedule_is_overridden(job: Runs) -> None:
    """Parameter groups have rates of their own; Megatron 0.19 cannot load them changed."""
    changed = words("--override-opt_param-scheduler --lr 5e-4 --min-lr 1e-4 --weight-decay 0.2")
    job.train(DP2, "rates", *changed)
    resume(job, "whole", "other-rates", *changed)
    assert starts_at(job, "other-rates") == SNAPSHOT_AT
    expected, found = (job.final(name, 0)["optimizers"] for name in ("rates", "other-rates"))
    assert [part["groups"] for part in found] == [part["groups"] for part in expected]


@pytest.mark.megatron
@pytest.mark.slow
def test_another_rate_is_refused_if_it_is_not(job: Runs) -> None:
    arenas = {LOAD_FROM: job.folder / "whole" / "arenas"}
    outcome = job.train(DP2, "rate", SNAPSHOTS, "--lr", "5e-4", succeed=False, **arenas)
    assert all(outcome.codes) and not outcome.hung and not job.lines("rate", 0)
    assert "for learning rate do not match" in outcome.output(0)


@pytest.mark.megatron
@pytest.mark.slow
def test_a_checkpoint_whose_saving_was_broken_off_is_saved(job: Runs) -> None:
    """Of the last iteration too: nothing else would ever save it."""
    job.train(DP2, "ended", SNAPSHOTS, **{SAVE_AT: ITERATIONS})
    for earlier, at in (("whole", SNAPSHOT_AT), ("ended", ITERATIONS)):
        disk = job.folder / f"broken{at}"
        for iteration in range(2, at, 2):
            shutil.copytree(
                checkpoint_folder(job.folder / "disk", iteration),
                checkpoint_folder(disk, iteration),
            )
        (disk / TRACKER).write_text(str(at - 2))
        saving = ("--save", str(disk), *CHECKPOINTS)
        after = resume(job, earlier, f"after{at}", *saving)
        assert f"the checkpoint of iteration {at} was not finished" in after.output(0)
        assert not (disk / SAVING_NOTE).exists()
        loading = ("--load", str(disk), "--ckpt-step", str(at))
        job.train(DP2, f"loaded{at}", *loading)
        found = job.differences(DP2, "whole", f"loaded{at}", at, ITERATIONS)
        # A run with nothing left to do has seen no iteration.
        assert not [d for d in found if GROUPS not in d and not d.endswith("/iteration")]


@pytest.mark.megatron
@pytest.mark.slow
def test_a_checkpoint_that_is_complete_is_not_saved_again(job: Runs) -> None:
    saving = ("--save", set_tracker(job, SNAPSHOT_AT), *CHECKPOINTS)
    after = resume(job, "whole", "complete", *saving)
    assert starts_at(job, "complete") == SNAPSHOT_AT
    assert "was not finished" not in after.output(0)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_another_model_of_the_same_shapes_is_refused_as_megatron_does(
    job: Runs, source: str
) -> None:
    name, changed = f"heads-{source}", words("--num-attention-heads 2")
    load = ("--load", set_tracker(job, SNAPSHOT_AT))
    if source == "disk":
        outcome = job.train(DP2, name, *load, *changed, succeed=False)
    else:
        arenas = job.folder / "whole" / "arenas"
        outcome = job.train(
            DP2, name, SNAPSHOTS, *load, *changed, succeed=False, **{LOAD_FROM: arenas}
        )
    assert all(outcome.codes) and not outcome.hung and not job.lines(name, 0)
    said = "num_attention_heads value" if source == "disk" else "--num-attention-heads was 4"
    assert said in outcome.output(0)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (program("unknown-adam"), "keeps 'curvature'"),
        (program("opaque-loader", EXTERNAL), "has no methods that give its position"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_what_would_be_lost_is_refused_before_training(
    runs: Runs, layout: Layout, reason: str
) -> None:
    outcome = runs.train(layout, "refused", SNAPSHOTS, succeed=False)
    assert all(outcome.codes) and not outcome.hung
    for rank in range(layout.ranks):
        assert "ConfigError" in outcome.output(rank) and reason in outcome.output(rank)
        assert not runs.lines("refused", rank)
