"""A snapshot of one layout of Megatron restored into another.

The oracle is Megatron alone: it saves a checkpoint of the same iteration in the old layout and
resumes from it in the new one.  Losses and complete states at the end are equal bit by bit.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

if find_spec("megatron") is None or find_spec("megatron.training") is None:
    pytest.skip("needs megatron-core with megatron.training", allow_module_level=True)

from megatron_ft.cli.demo import final_state
from tests.support.late_capture import RESHAPE_FROM, SAVE_AT
from tests.support.megatron_layouts import (
    DISTRIBUTED,
    EXPERTS,
    LAYER_WISE,
    MUON,
    OVERFLOWING,
    PP2,
    TP2,
    Flags,
    Layout,
    words,
)
from tests.support.megatron_programs import PRECISION_AWARE
from tests.support.megatron_runs import ITERATIONS, SNAPSHOT_AT, SNAPSHOTS, Runs

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

# With the token that ends a document 384, which is padded to the same with 1, 2 and 4 tensor ranks.
VOCABULARY = words("--vocab-size 383")
TP4 = words("--tensor-model-parallel-size 4 --sequence-parallel")
FOUR_LAYERS = words("--num-layers 4")
INTERLEAVED = (*PP2, *FOUR_LAYERS, *words("--num-layers-per-virtual-pipeline-stage 1"))
# Without expert parallelism, experts with biases fail in Megatron's own forward.
EP1 = (*EXPERTS, "--disable-bias-linear")
EP2 = (*EP1, *words("--expert-model-parallel-size 2"))
EP4 = (*EP1, *words("--expert-model-parallel-size 4"))

PLUGINS = "tests.programs.megatron_plugins"
TWO_RATES = (
    "--untie-embeddings-and-output-weights",
    *words("--decoupled-lr 5e-4 --decoupled-min-lr 1e-4"),
)
PREDICTING = words("--mtp-num-layers 1 --position-embedding-type rope --disable-bias-linear")
INSTANCES = words("--num-distributed-optimizer-instances 2")
COUNTING = words("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2")

# Their iterators draw from the generator of dropout, which they could not if that were a device's.
QUIET = (f"{PLUGINS}:quiet_data_loaders",)


RELATIVE = 2e-3
"""Of losses with bf16 weights, some iterations later."""


class Change(NamedTuple):
    """Two layouts, and flags that both have."""

    name: str
    before: tuple[int, Flags]
    after: tuple[int, Flags]
    both: Flags = DISTRIBUTED
    plugins: tuple[str, ...] = ()


CHANGES = [
    Change("tp2-dp2-to-dp4", (4, TP2), (4, ()), (*DISTRIBUTED, "--swiglu")),
    Change("tp2-dp2-to-tp4", (4, TP2), (4, TP4)),
    Change("pp2-dp2-to-tp2-pp2", (4, PP2), (4, (*TP2, *PP2))),
    Change("dp4-to-dp3", (4, ()), (3, ()), (*DISTRIBUTED, *words("--global-batch-size 24"))),
    Change("ep4-to-ep2", (4, EP4), (2, EP2)),
    Change("ep2-pp2-to-ep4", (4, (*EP2, *PP2)), (4, EP4)),
    Change("pp2-to-interleaved", (2, (*PP2, *FOUR_LAYERS)), (2, INTERLEAVED)),
    Change(
        "interleaved-to-alone", (2, INTERLEAVED), (1, FOUR_LAYERS), ("--use-distributed-optimizer",)
    ),
    Change("replicated-tp2-to-dp2", (2, TP2), (2, ()), ("--bf16",)),
    Change("replicated-fp32", (4, TP2), (2, PP2), ()),
    Change("scaled-loss", (2, TP2), (2, PP2), ("--fp16", *OVERFLOWING, *DISTRIBUTED[1:])),
    Change("two-rates", (2, PP2), (2, TP2), (*DISTRIBUTED, *TWO_RATES)),
    Change("frozen", (4, TP2), (2, PP2), plugins=(f"{PLUGINS}:freeze_positions",)),
    Change("fused-adam", (2, ()), (4, (*TP2, *PP2)), plugins=(f"{PLUGINS}:installed_apex_adam",)),
    Change("predicting-more", (2, TP2), (4, ()), (*DISTRIBUTED, *PREDICTING)),
    Change("instances-to-one", (4, INSTANCES), (2, ())),
    Change("one-to-instances", (2, ()), (4, INSTANCES)),
    Change("muon", (4, TP2), (2, PP2), MUON),
    Change("muon-layer-wise", (4, TP2), (2, ()), LAYER_WISE),
    Change("counting-experts", (4, EP4), (2, EP2), (*DISTRIBUTED, *COUNTING)),
]
ORDINARY = ("tp2-dp2-to-dp4", "ep4-to-ep2")


def cell(change: Change) -> Any:
    marks = () if change.name in ORDINARY else pytest.mark.all_layouts
    return pytest.param(change, id=change.name, marks=marks)


@pytest.mark.parametrize("change", [cell(change) for change in CHANGES])
def test_training_goes_on_in_another_layout_as_from_megatrons_checkpoint(
    change: Change, runs: Runs
) -> None:
    before, after = layouts(change)
    own = str(runs.folder / "own")
    saving = ("--save", own, "--save-interval", str(SNAPSHOT_AT))
    reshape(runs, before, after, *saving)
    runs.train(after, "stock", "--load", own, "--ckpt-step", str(SNAPSHOT_AT))
    for rank in range(after.ranks):
        assert runs.lines("ours", rank) == runs.lines("stock", rank)
        finals = [comparable(runs.final(name, rank)) for name in ("ours", "stock")]
        found = final_state.differences(*finals)
        assert not found, f"rank {rank}: {len(found)} differences: {'; '.join(found[:20])}"


def layouts(change: Change) -> tuple[Layout, Layout]:
    both = (*change.both, *VOCABULARY, "--dist-ckpt-optim-fully-reshardable")
    before, after = (
        Layout(change.name, ranks, (*both, *flags), "none", plugins=(*QUIET, *change.plugins))
        for ranks, flags in (change.before, change.after)
    )
    return before, after


def reshape(runs: Runs, before: Layout, after: Layout, *flags: str) -> None:
    """Train with ``flags``, and in another layout from a snapshot of that."""
    runs.train(before, "whole", SNAPSHOTS, *flags, **{SAVE_AT: SNAPSHOT_AT})
    arenas = str(runs.folder / "whole" / "arenas")
    said = runs.train(after, "ours", SNAPSHOTS, **{RESHAPE_FROM: arenas}).output(0)
    assert "tensors with a place" in said and "snapshot of another layout: exact" in said
    assert list(runs.lines("ours", 0)) == list(range(SNAPSHOT_AT + 1, ITERATIONS + 1))


def comparable(final: Any) -> Any:
    """Without what Megatron's loader makes of it that is not the state of the old layout.

    It leaves in each group a ``step`` that torch's optimizers never look at, and gives all
    data-parallel ranks the experts' random state of the first.
    """
    del final["random"]["tracker"]["expert-parallel-rng"]
    for part in final["optimizers"]:
        if all("step" in state for state in part["state"]):
            for group in part["groups"]:
                group.pop("step", None)
    return final


UNKNOWN_TO_MEGATRON = [
    Change("ep2-to-ep1", (2, EP2), (2, EP1)),
    Change("ep1-to-ep2", (2, EP1), (2, EP2)),
]


@pytest.mark.all_layouts
@pytest.mark.parametrize("change", UNKNOWN_TO_MEGATRON, ids=lambda change: change.name)
def test_where_megatron_has_no_checkpoint_training_goes_on_as_without_a_change(
    change: Change, runs: Runs
) -> None:
    """With experts spread or not, its number of optimizers is another.

    Data and dropout are those of the uninterrupted run, sums differ in their order.
    """
    before, after = layouts(change)
    reshape(runs, before, after)
    whole = {at: line for r in range(before.ranks) for at, line in runs.lines("whole", r).items()}
    losses = [line for rank in range(after.ranks) for line in runs.lines("ours", rank).items()]
    known = [(at, loss) for at, (loss, _) in losses if loss]
    assert {at for at, _ in known} == set(range(SNAPSHOT_AT + 1, ITERATIONS + 1))
    for at, loss in known:
        expected = whole[at][0]
        assert expected
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected), rel=RELATIVE), at


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            Change(
                "scaled-moments",
                (2, ()),
                (1, ()),
                ("--bf16", *PRECISION_AWARE),
                (f"{PLUGINS}:transformer_engine_adam",),
            ),
            "have no known place in the unsharded model",
        ),
        (
            Change("undescribed", (2, ()), (1, ()), plugins=(f"{PLUGINS}:nothing_sharded",)),
            "this model is not sharded",
        ),
        (
            Change("kept-beside", (2, TP2), (2, ()), plugins=(f"{PLUGINS}:extra_state",)),
            "keeps state outside of its parameters and buffers",
        ),
        (
            Change(
                "own-loader",
                (2, ()),
                (1, ()),
                (*DISTRIBUTED, *words("--dataloader-type external")),
                (f"{PLUGINS}:savable_loader",),
            ),
            "external data loader",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_cannot_be_taken_over_is_refused(change: Change, reason: str, runs: Runs) -> None:
    before, after = layouts(change)
    runs.train(before, "whole", SNAPSHOTS, **{SAVE_AT: SNAPSHOT_AT})
    arenas = str(runs.folder / "whole" / "arenas")
    refused = runs.train(after, "ours", SNAPSHOTS, succeed=False, **{RESHAPE_FROM: arenas})
    assert all(refused.codes), refused.codes
    assert "LayoutMismatchError" in refused.output(0) and reason in refused.output(0)
