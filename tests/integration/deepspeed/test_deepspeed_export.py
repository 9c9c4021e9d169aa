"""DeepSpeed's own files, made from snapshots: equal bit by bit, and good to resume from."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from megatron_ft.cli.demo import final_state
from tests.programs import deepspeed_export as program
from tests.programs.deepspeed_program import OWN, SEEDED
from tests.support.deepspeed_cells import EXPLODES, FP32_GRADIENTS, Cell, zero
from tests.support.deepspeed_cells_parallel import ON_HOST, experts, piped, sharded, zero3
from tests.support.deepspeed_runs import Runs
from tests.support.late_capture import LOAD_FROM, SAVE_AT
from tests.support.resume_runs import ITERATIONS, SNAPSHOT_AT
from tests.support.warm_host import Request

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

ZERO2 = Cell("zero2-bf16", 2, zero(2, "bf16"))
ZERO3 = Cell("zero3-bf16", 2, zero3("bf16"))
ROUND_ROBIN = Cell("zero2-round-robin", 2, zero(2, "bf16", round_robin_gradients=True))
CELLS = [
    Cell("zero0-bf16", 2, zero(0, "bf16")),
    Cell("zero0-fp32", 2, zero(0, "fp32")),
    Cell("zero1-fp16", 2, zero(1, "fp16")),
    Cell("zero1-bf16-fp32-gradients", 2, {**zero(1, "bf16"), **FP32_GRADIENTS}),
    ROUND_ROBIN,
    Cell("zero2-fp32-offload", 2, zero(2, "fp32", offload_optimizer=ON_HOST)),
    Cell("zero3-fp16", 2, zero3("fp16")),
    Cell("zero3-offload", 2, zero3("bf16", offload_optimizer=ON_HOST, offload_param=ON_HOST)),
    piped("pipeline-zero1-bf16", 4, zero(1, "bf16")),
    sharded("tensor-zero1-bf16", zero(1, "bf16")),
    experts("experts-zero2-bf16", [4, 2], zero(2, "bf16")),
]
MORE_CELLS = [
    Cell("zero0-fp16", 2, zero(0, "fp16"), options=EXPLODES),
    Cell("zero1-bf16", 2, zero(1, "bf16")),
    Cell("zero1-fp32", 2, zero(1, "fp32")),
    Cell("zero2-fp16", 2, zero(2, "fp16")),
    Cell("zero3-fp32", 2, zero3("fp32")),
    Cell("zero3-secondary", 4, zero3("bf16", zero_hpz_partition_size=2)),
    piped("pipeline-fp32", 2, zero(0, "fp32")),
    piped("pipeline-bf16", 4, zero(0, "bf16")),
    sharded("tensor-zero3-fp32", zero3("fp32")),
    experts("experts-zero1-fp32", [2], zero(1, "fp32")),
    experts("experts-zero0-bf16", [2], zero(0, "bf16")),
]
"""With what CI runs these make every pair of stage and precision, and more."""


def save_both(runs: Runs, cell: Cell, **variables: object) -> dict[str, str]:
    """Train; take a snapshot and have DeepSpeed save a checkpoint of the same step."""
    own = runs.folder / "own"
    runs.train(cell, "whole", **{SAVE_AT: SNAPSHOT_AT, OWN: own} | variables)
    return {
        program.ARENAS: str(runs.folder / "whole" / "arenas"),
        program.EXPORTED: str(runs.folder / "exported"),
        program.REFERENCE: str(own),
    }


def call(runs: Runs, function: str, environment: dict[str, str], code: int = 0) -> str:
    """Run a function of deepspeed_export in a process of its own; what it printed."""
    logs = str(runs.folder / function)
    request = Request(
        f"tests.programs.deepspeed_export:{function}", [], 1, logs, 100.0, environment
    )
    outcome = runs.server.run(request)
    assert outcome.codes == [code], outcome.story()
    return outcome.output(0)


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.all_layouts) for cell in MORE_CELLS)],
    ids=lambda cell: cell.name,
)
def test_an_export_is_what_deepspeed_would_have_saved(cell: Cell, deepspeed_runs: Runs) -> None:
    output = call(deepspeed_runs, "compare_export", save_both(deepspeed_runs, cell))
    assert "compared" in output


def go_on(runs: Runs, cell: Cell, name: str, folder: str) -> None:
    """Train to the end from a checkpoint, by DeepSpeed alone."""
    request = runs.request(cell, name, **{SEEDED: 1, program.EXPORTED: folder})
    outcome = runs.server.run(replace(request, entry="tests.programs.deepspeed_export:train_stock"))
    assert not any(outcome.codes), outcome.story()
    assert f"loaded {folder}" in outcome.output(0)
    assert list(runs.lines(name, 0)) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))


@pytest.mark.all_layouts
def test_deepspeed_goes_on_from_an_export_as_from_its_own(deepspeed_runs: Runs) -> None:
    runs = deepspeed_runs
    paths = save_both(runs, ZERO2, **{SEEDED: 1})
    call(runs, "compare_export", paths)
    for name, path in (("after", program.EXPORTED), ("from-own", program.REFERENCE)):
        go_on(runs, ZERO2, name, paths[path])
    runs.require_same(ZERO2, "from-own", "after", after=SNAPSHOT_AT, but="/random/")
    assert "converted 7 weights" in call(runs, "convert", paths)


def test_deepspeed_goes_on_from_an_export_to_what_the_unbroken_run_came_to(
    deepspeed_runs: Runs,
) -> None:
    """With ZeRO-3, whose files hold every rank's buffers; with others rank 0's are all's."""
    runs = deepspeed_runs
    paths = save_both(runs, ZERO3, **{SEEDED: 1})
    call(runs, "compare_export", paths)
    go_on(runs, ZERO3, "after", paths[program.EXPORTED])
    for rank in range(ZERO3.ranks):
        whole, after = runs.lines("whole", rank), runs.lines("after", rank)
        assert after == {at: line for at, line in whole.items() if at > SNAPSHOT_AT}
        states = [runs.final(name, rank) for name in ("whole", "after")]
        for part in ("inner", "model", "schedule"):
            assert final_state.differences(*[state[part] for state in states]) == []


@pytest.mark.all_layouts
def test_deepspeeds_own_map_is_wrong_under_round_robin(deepspeed_runs: Runs) -> None:
    """So ds_to_universal mixes up parameters, of an export as of the original; ours does not."""
    paths = save_both(deepspeed_runs, ROUND_ROBIN)
    call(deepspeed_runs, "compare_export", paths)
    assert "other values" in call(deepspeed_runs, "convert", paths, code=1)


def test_a_resumed_run_is_exported_as_well(deepspeed_runs: Runs) -> None:
    """What ZeRO-3 gathers when a run is resumed is not in its files all the same."""
    first = deepspeed_runs.folder / "first" / "arenas"
    deepspeed_runs.train(ZERO3, "first", **{SAVE_AT: SNAPSHOT_AT})
    paths = save_both(deepspeed_runs, ZERO3, **{SAVE_AT: SNAPSHOT_AT + 2, LOAD_FROM: first})
    assert "compared" in call(deepspeed_runs, "compare_export", paths)


def test_what_no_snapshot_holds_is_said_at_the_start_and_by_the_export(
    deepspeed_runs: Runs,
) -> None:
    cell = replace(ZERO2, model="tests.programs.deepspeed_export:with_unknown")
    paths = save_both(deepspeed_runs, cell)
    logs = deepspeed_runs.folder / "whole" / "logs"
    start = "".join(path.read_text() for path in logs.iterdir())
    assert "cannot be exported: ExportError: no snapshot holds a tensor of [3]" in start
    said = call(deepspeed_runs, "refuse_export", paths)
    assert "could not describe shard" in said and "mp_rank_00_model_states.pt" in said
    assert "left behind: []" in said
