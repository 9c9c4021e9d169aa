"""DeepSpeed's engine with other ranks: as DeepSpeed from its own universal checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from megatron_ft.cli.demo import final_state
from tests.programs.deepspeed_program import CHECKPOINT, OWN, SEEDED
from tests.support.deepspeed_cells import FP32_GRADIENTS, Cell, zero
from tests.support.deepspeed_cells_parallel import ON_HOST, experts, piped, sharded, zero3
from tests.support.deepspeed_runs import Runs
from tests.support.late_capture import RESHAPE_FROM, SAVE_AT
from tests.support.resume_runs import ITERATIONS, SNAPSHOT_AT
from tests.support.warm_host import Request

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]


def shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """With one global batch, whatever the number of ranks."""
    kept = {key: value for key, value in config.items() if key != "gradient_accumulation_steps"}
    return {**kept, "train_batch_size": 24}


def cell(name: str, ranks: int, config: Mapping[str, Any], **more: Any) -> Cell:
    return Cell(name, ranks, shared(config), options={"averages": False}, **more)


def alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as DeepSpeed's own checkpoints of it load rightly (0.19.8)."""
    stage = dict(config["zero_optimization"])
    # ds_to_universal mixes up parameters of partitions that were dealt out in turn.
    stage.pop("round_robin_gradients", None)
    return {**config, "zero_optimization": stage}


def universal(runs: Runs) -> None:
    """DeepSpeed's own checkpoint of the snapshot's step, converted by DeepSpeed."""
    own = runs.folder / "own"
    tag = (own / "latest").read_text()
    flags = ["--input_folder", str(own / tag), "--output_folder", str(own / f"{tag}_universal")]
    more = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    logs = str(runs.folder / "convert")
    entry = "tests.programs.deepspeed_program:convert"
    outcome = runs.server.run(Request(entry, [*flags, *more], 1, logs, 100.0, {}))
    assert outcome.codes == [0], outcome.story()


def check(runs: Runs, old: Cell, new: Cell) -> None:
    """Losses, weights, masters, moments, steps and schedules are bit by bit those of DeepSpeed."""
    saving = {SAVE_AT: SNAPSHOT_AT, OWN: runs.folder / "own", SEEDED: 1}
    runs.train(replace(old, config=alone(old.config)), "own-run", **saving)
    folder = runs.folder / "own-run"
    if alone(old.config) != old.config:
        folder = runs.folder / "whole"
        runs.train(old, "whole", **{SAVE_AT: SNAPSHOT_AT, SEEDED: 1})
    after = runs.train(new, "after", **{RESHAPE_FROM: folder / "arenas", SEEDED: 1})
    assert "tensors with a place" in after.output(0), after.story()
    config = alone(new.config)
    if config["zero_optimization"]["stage"]:
        universal(runs)
        config["checkpoint"] = {"load_universal": True}
    runs.train(replace(new, config=config), "alone", **{CHECKPOINT: runs.folder / "own", SEEDED: 1})
    for rank in range(new.ranks):
        lines = [runs.lines(name, rank) for name in ("after", "alone")]
        assert list(lines[0]) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
        assert lines[0] == lines[1]
        states = [runs.final(name, rank) for name in ("after", "alone")]
        for part in ("inner", "model", "schedule", "scaler"):
            assert final_state.differences(*[state[part] for state in states]) == []


HOST_ADAM = "tests.programs.deepspeed_models:with_host_adam"


def even(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without weight decay: of ZeRO-3, DeepSpeed loads the first group's into all (0.19.8)."""
    optimizer = config["optimizer"]
    params = {**optimizer["params"], "weight_decay": 0.0}
    return {**config, "optimizer": {**optimizer, "params": params}}


HOST = {"offload_optimizer": ON_HOST}
ZERO3_ON_HOST = zero3("bf16", **HOST, offload_param=ON_HOST)
ZERO2 = cell("zero2-bf16", 2, zero(2, "bf16"))
CASES = [
    (replace(ZERO2, ranks=4), 2),
    (cell("zero3-bf16", 4, even(zero3("bf16"))), 3),
    (cell("zero0-bf16", 2, zero(0, "bf16")), 3),
    (cell("zero1-fp16", 3, zero(1, "fp16")), 2),
]
MORE_CASES = [
    (ZERO2, 3),
    (cell("zero0-fp32", 2, zero(0, "fp32")), 3),
    (cell("zero1-bf16-fp32-gradients", 2, {**zero(1, "bf16"), **FP32_GRADIENTS}), 3),
    (cell("zero2-fp32-offload", 3, zero(2, "fp32", **HOST)), 4),
    (cell("round-robin", 3, zero(2, "bf16", round_robin_gradients=True)), ZERO2),
    (cell("zero3-fp16", 2, even(zero3("fp16"))), 3),
    (cell("zero3-offload", 3, even(ZERO3_ON_HOST)), 2),
    (cell("host-adam", 4, zero(2, "bf16"), model=HOST_ADAM), 3),
]
"""With those that CI runs, every stage and precision."""


@pytest.mark.parametrize(
    ("old", "new"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.all_layouts) for case in MORE_CASES)],
    ids=lambda value: value.name if isinstance(value, Cell) else str(value),
)
def test_training_with_other_ranks_is_deepspeeds(
    old: Cell, new: int | Cell, deepspeed_runs: Runs
) -> None:
    check(deepspeed_runs, old, new if isinstance(new, Cell) else replace(old, ranks=new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (cell("zero1", 3, zero(1, "fp32")), cell("zero3", 2, zero3("fp32"))),
        pytest.param(
            cell("zero3", 2, zero3("fp32")),
            cell("zero2", 3, zero(2, "fp32")),
            marks=pytest.mark.all_layouts,
        ),
    ],
    ids=lambda cell: cell.name,
)
def test_another_stage_trains_as_the_old_one_with_as_many_ranks(
    old: Cell, new: Cell, deepspeed_runs: Runs
) -> None:
    """DeepSpeed loads no checkpoint of another stage; the sums of gradients have another order."""
    runs = deepspeed_runs
    runs.train(old, "whole", **{SAVE_AT: SNAPSHOT_AT, SEEDED: 1})
    source = {RESHAPE_FROM: runs.folder / "whole" / "arenas", SEEDED: 1}
    runs.train(new, "after", **source)
    runs.train(replace(old, ranks=new.ranks), "alone", **source)
    for rank in range(new.ranks):
        after, alone = (losses(runs, name, rank) for name in ("after", "alone"))
        assert after == pytest.approx(alone, rel=1e-5)


def losses(runs: Runs, name: str, rank: int) -> list[float]:
    lines = runs.lines(name, rank).values()
    return [float.fromhex(loss) for text, _ in lines for loss in (text or "").split()]


TENSOR = {"tensor": 2, "averages": False}


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    ("old", "ranks"),
    [
        (piped("pipeline-zero1-bf16", 4, shared(zero(1, "bf16"))), 2),
        (piped("pipeline-bf16", 2, shared(zero(0, "bf16"))), 4),
        (replace(sharded("tensor-zero1-bf16", shared(zero(1, "bf16"))), options=TENSOR), 2),
        (replace(sharded("tensor-zero3-fp32", shared(zero3("fp32"))), options=TENSOR), 6),
        (experts("experts-zero2-bf16", [2], shared(zero(2, "bf16"))), 2),
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else str(value),
)
def test_every_part_of_a_divided_model_is_where_it_was(
    old: Cell, ranks: int, deepspeed_runs: Runs
) -> None:
    """Each tensor is compared with the whole one of the old ranks, and training continues."""
    runs = deepspeed_runs
    runs.train(old, "whole", **{SAVE_AT: SNAPSHOT_AT, SEEDED: 1})
    source = {RESHAPE_FROM: runs.folder / "whole" / "arenas", SEEDED: 1}
    after = runs.train(replace(old, ranks=ranks), "after", **source)
    assert "tensors with a place" in after.output(0), after.story()
    assert list(runs.lines("after", 0)) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
