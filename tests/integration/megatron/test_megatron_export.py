"""Checkpoints of Megatron's own, made from snapshots: equal bit by bit, and good to resume from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("megatron") is None or find_spec("megatron.training") is None:
    pytest.skip("needs megatron-core with megatron.training", allow_module_level=True)

from megatron_ft.checkpoint import native
from megatron_ft.cli.demo import demo_model
from megatron_ft.launchers.virtual import VirtualCluster
from tests.programs import megatron_export as program
from tests.support.late_capture import LOAD_FROM, SAVE_AT
from tests.support.megatron_layouts import (
    DISTRIBUTED,
    EP2,
    LAYER_WISE,
    MUON,
    PP2,
    TP2,
    VPP,
    Layout,
    muon,
    words,
)
from tests.support.megatron_runs import ITERATIONS, SNAPSHOT_AT, SNAPSHOTS, Runs
from tests.support.no_pickle import check_holds_no_pickle
from tests.support.warm_host import Request

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

MEGATRON_FT = (sys.executable, "-m", "megatron_ft.cli.main")
COMMAND_SECONDS = 120
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
GATED = "--swiglu"
# Sizes that leave gaps between parameters, as buckets are padded to multiples of 64.
UNEVEN = words("--hidden-size 36 --ffn-hidden-size 44 --untie-embeddings-and-output-weights")
LAYOUTS = [
    Layout("alone", 1, DISTRIBUTED, "none"),
    Layout("uneven", 2, (*DISTRIBUTED, *UNEVEN, GATED, "--data-parallel-random-init")),
    Layout("tp2-pp2", 4, (*TP2, *PP2, *DISTRIBUTED, GATED)),
    Layout("vpp2-fp32", 2, (*VPP, "--use-distributed-optimizer")),
    Layout("ep2", 2, (*EP2, *DISTRIBUTED, GATED, "--disable-bias-linear")),
    Layout("replicated", 2, ("--bf16",)),
    Layout("replicated-fp16-tp2", 4, (*TP2, *words("--fp16 --initial-loss-scale 1024"))),
    Layout("replicated-fp32", 2),
    Layout("reshardable-tp2", 4, (*TP2, *DISTRIBUTED, RESHARDABLE, GATED)),
    Layout("reshardable-ep2-pp2", 4, (*EP2, *PP2, *DISTRIBUTED, RESHARDABLE)),
    muon("muon-tp2", 4, *TP2, *MUON),
    muon("muon-layer-wise", 2, *LAYER_WISE),
    muon("muon-ordered", 2, *LAYER_WISE, ordered=True),
    Layout("optimizer-not-saved", 2, (*DISTRIBUTED, "--no-save-optim", "--no-save-rng")),
    Layout(
        "two-optimizer-instances",
        4,
        (*DISTRIBUTED, *words("--num-distributed-optimizer-instances 2")),
    ),
    Layout("extra-state", 2, DISTRIBUTED, plugins=("tests.programs.megatron_plugins:extra_state",)),
    Layout(
        "freeze-positions",
        2,
        DISTRIBUTED,
        plugins=("tests.programs.megatron_plugins:freeze_positions",),
    ),
]


def save_both(runs: Runs, layout: Layout, *flags: str) -> dict[str, str]:
    """Train; take a snapshot and have Megatron save a checkpoint of the same iteration."""
    own = runs.folder / "own"
    saving = ("--save", str(own), "--save-interval", str(SNAPSHOT_AT))
    runs.train(layout, "whole", SNAPSHOTS, *saving, *flags, **{SAVE_AT: SNAPSHOT_AT})
    return {
        program.ARENAS: str(runs.folder / "whole" / "arenas"),
        program.EXPORTED: str(runs.folder / "exported"),
        program.REFERENCE: str(own / f"iter_{SNAPSHOT_AT:07d}"),
    }


def call(runs: Runs, function: str, environment: dict[str, str]) -> str:
    """Run a function of megatron_export in a process of its own; what it printed."""
    logs = str(runs.folder / function)
    request = Request(f"tests.programs.megatron_export:{function}", [], 1, logs, 100.0, environment)
    outcome = runs.server.run(request)
    assert outcome.codes == [0], outcome.story()
    return outcome.output(0)


# Gaps, experts, replicas and tensor parallelism at least once.
ORDINARY = ("uneven", "ep2", "replicated-fp16-tp2")


def cell(layout: Layout) -> Any:
    marks = () if layout.name in ORDINARY else pytest.mark.all_layouts
    return pytest.param(layout, id=layout.name, marks=marks)


@pytest.mark.parametrize("layout", [cell(layout) for layout in LAYOUTS])
def test_an_export_is_what_megatron_would_have_saved(layout: Layout, runs: Runs) -> None:
    output = call(runs, "compare_export", save_both(runs, layout))
    assert "compared" in output
    assert layout.name != "uneven" or " 0 gaps" not in output


def test_the_logical_map_gives_every_global_tensor(runs: Runs) -> None:
    layout = Layout("tp2-dp2", 4, (*TP2, *DISTRIBUTED, GATED, RESHARDABLE))
    assert "compared" in call(runs, "compare_logical_map", save_both(runs, layout))


def test_the_logical_map_of_experts_and_replicas(runs: Runs) -> None:
    layout = Layout("ep2", 4, (*EP2, "--bf16"))
    assert "compared" in call(runs, "compare_logical_map", save_both(runs, layout))


@pytest.mark.all_layouts
def test_megatron_goes_on_from_an_export(runs: Runs) -> None:
    """Without us, as it does from its own checkpoint, and to the losses of the unbroken run."""
    layout = Layout("tp2-dp2", 4, (*TP2, *DISTRIBUTED))
    paths = save_both(runs, layout)
    call(runs, "compare_export", paths)
    after = runs.train(layout, "after", "--load", paths[program.EXPORTED])
    assert "successfully loaded checkpoint" in after.output(0)
    own = ("--load", str(runs.folder / "own"), "--ckpt-step", str(SNAPSHOT_AT))
    runs.train(layout, "from-own", *own)
    assert runs.differences(layout, "from-own", "after", SNAPSHOT_AT, ITERATIONS) == []
    for rank in range(layout.ranks):
        whole, resumed = runs.lines("whole", rank), runs.lines("after", rank)
        assert list(resumed) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
        assert resumed == {at: line for at, line in whole.items() if at > SNAPSHOT_AT}


def test_a_model_that_cannot_be_described_is_restored_but_not_exported(runs: Runs) -> None:
    plugins = ("tests.programs.megatron_plugins:nothing_sharded",)
    layout = Layout("nothing-sharded", 2, DISTRIBUTED, plugins=plugins)
    whole = runs.train(layout, "whole", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    assert "cannot be exported: NotImplementedError: this model is not sharded" in whole.output(0)
    arenas = str(runs.folder / "whole" / "arenas")
    runs.train(layout, "after", SNAPSHOTS, **{LOAD_FROM: arenas})
    assert runs.differences(layout, "whole", "after", SNAPSHOT_AT, ITERATIONS) == []
    paths = {program.ARENAS: arenas, program.EXPORTED: str(runs.folder / "exported")}
    said = call(runs, "refuse_export", paths)
    assert "could not describe shard" in said and "this model is not sharded" in said
    assert "left behind: []" in said


@pytest.mark.all_layouts
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_export_of_a_running_job_and_of_what_was_drained(runs: Runs) -> None:
    """By commands in processes of their own and by the job, while the trainers train."""
    command = [*MEGATRON_FT, "run", "--nodes", "2", "--protect", "xor:2", *job_flags(runs)]
    own = runs.folder / "own"
    command += ["--drain-dir", str(runs.folder / "disk"), "--drain-interval", "100"]
    command += ["--drain-export-dir", str(own)]
    training = demo_model.demo_arguments(
        iterations=100_000, data_path=runs.corpus, hidden=32, sequence=16
    )
    program_flags = ["-m", "tests.programs.pretrain_gpt", *training, SNAPSHOTS]
    job = subprocess.Popen(
        # The trainers train as long as the commands run: those go first.
        [*command, "--", "nice", "-n", "19", sys.executable, *program_flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | demo_model.ENVIRONMENT | {"PYTHONWARNINGS": "ignore"},
    )
    try:
        # Each export imports Megatron, so with no later snapshot the job makes this one only.
        await_line(job, " is on disk after ")
        megatron_ft("pause", *job_flags(runs)[:2])
        await_line(job, " is exported to ")
        live = exported(megatron_ft("export", *job_flags(runs), "--to", str(runs.folder / "live")))
        drained = str(runs.folder / "drained")
        megatron_ft("drain", *job_flags(runs), "--to", drained)
        check_holds_no_pickle(Path(drained))
        later = exported(
            megatron_ft("export", "--from", drained, "--to", str(runs.folder / "later"))
        )
        assert job.poll() is None, "training did not continue meanwhile"
    finally:
        job.terminate()
        job.communicate(timeout=60)
        VirtualCluster(job_flags(runs)[1], ["node0", "node1"]).destroy()
    call(runs, "compare_checkpoints", {program.EXPORTED: live, program.REFERENCE: later})
    kept = native.newest_checkpoint(own)
    assert kept is not None
    call(runs, "read_all", {program.EXPORTED: str(kept)})
    with pytest.raises(subprocess.CalledProcessError):
        megatron_ft("export", "--from", drained, "--to", str(runs.folder / "later"))


def job_flags(runs: Runs) -> list[str]:
    """The job's name, and where it keeps its notes."""
    return ["--job", f"export-{os.getpid()}", "--state-dir", str(runs.folder / "state")]


def megatron_ft(*arguments: str) -> str:
    """Run one command to its end; what it printed."""
    done = subprocess.run(
        [*MEGATRON_FT, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMMAND_SECONDS,
        check=True,
    )
    return done.stdout


def exported(output: str) -> str:
    """The folder that an export named."""
    found = re.search(r"shards in .* s: (\S+)$", output, re.MULTILINE)
    assert found, output
    return found.group(1)


def await_line(job: subprocess.Popen[str], text: str) -> None:
    """Read what a job prints until a line holds ``text``; its end ends the wait."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"the job ended before it said {text!r}:\n{''.join(lines)}")
