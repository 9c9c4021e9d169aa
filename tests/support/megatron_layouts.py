"""Layouts of Megatron runs that the tests compare: the matrix, and what lies beside it.

A layout is some flags and a number of processes.  The matrix is the product of four axes;
``pairwise`` picks some of it such that every two values of different axes meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Flags = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """One way to train; ``nodes_lost`` of its virtual nodes are lost and rebuilt.

    ``needs`` names a package that Megatron imports for this and that may be missing.
    """

    name: str
    ranks: int
    flags: Flags = ()
    scheme: str = "xor:2"
    ranks_per_node: int = 1
    nodes_lost: tuple[int, ...] = (1,)
    plugins: tuple[str, ...] = ()
    needs: str = ""

    @property
    def skips_iterations(self) -> bool:
        """Whether the loss scale overflows on both sides of the snapshot."""
        return "--fp16" in self.flags


def words(text: str) -> Flags:
    return tuple(text.split())


TP2 = words("--tensor-model-parallel-size 2 --sequence-parallel")
PP2 = words("--pipeline-model-parallel-size 2")
VPP = (*PP2, *words("--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"))
EXPERTS = words(
    "--num-experts 4 --moe-token-dispatcher-type allgather --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
EP2 = (*EXPERTS, *words("--expert-model-parallel-size 2"))

PARALLEL = {
    "dp4": Layout("dp4", 4, (), "rs:2+2", nodes_lost=(0, 2)),
    "tp2-sp-dp2": Layout("tp2-sp-dp2", 4, TP2, ranks_per_node=2),
    "pp2-dp2": Layout("pp2-dp2", 4, PP2, ranks_per_node=1, nodes_lost=(3,)),
    "ep2-edp2": Layout("ep2-edp2", 4, EP2, "xor:4", nodes_lost=(2,)),
    "vpp2-pp2": Layout("vpp2-pp2", 2, VPP),
}
# Gradients of these models overflow from a scale of about 65536 on.  It starts above that and
# doubles after each two good iterations, so steps are skipped before and after the snapshot.
OVERFLOWING = words("--initial-loss-scale 131072 --loss-scale-window 2 --hysteresis 1")
PRECISION: dict[str, Flags] = {"bf16": ("--bf16",), "fp16": ("--fp16", *OVERFLOWING), "fp32": ()}
OVERLAP = {"plain": False, "overlapped": True}
OPTIMIZER = {"distributed": True, "replicated": False}


def _overlap_flags(overlapped: bool, distributed: bool) -> Flags:
    # The gather belongs to the distributed optimizer; without it there is nothing to gather.
    if not overlapped:
        return ()
    both = ("--overlap-grad-reduce", "--overlap-param-gather")
    return both if distributed else both[:1]


def cell(parallel: str, precision: str, overlap: str, optimizer: str) -> Layout:
    base, distributed = PARALLEL[parallel], OPTIMIZER[optimizer]
    flags = [*base.flags, *PRECISION[precision], *_overlap_flags(OVERLAP[overlap], distributed)]
    if distributed:
        flags.append("--use-distributed-optimizer")
    return Layout(
        "-".join((parallel, precision, overlap, optimizer)),
        base.ranks,
        tuple(flags),
        base.scheme,
        base.ranks_per_node,
        base.nodes_lost,
    )


AXES = (tuple(PARALLEL), tuple(PRECISION), tuple(OVERLAP), tuple(OPTIMIZER))


def pairwise(axes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Cells that together hold every pair of values of two axes, greedily few."""
    wanted = {pair for cell in itertools.product(*axes) for pair in _pairs(cell)}
    chosen: list[tuple[str, ...]] = []
    while wanted:
        best = max(itertools.product(*axes), key=lambda cell: len(wanted & _pairs(cell)))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def _pairs(cell: Iterable[str]) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(cell), 2))


DISTRIBUTED = ("--bf16", "--use-distributed-optimizer")
BESIDE = [
    Layout("tp2-pp2", 4, (*TP2, *PP2, *DISTRIBUTED), "xor:4", nodes_lost=(0,)),
    Layout("untied", 2, (*PP2, *DISTRIBUTED, "--untie-embeddings-and-output-weights")),
    Layout("accumulated", 2, (*DISTRIBUTED, *words("--micro-batch-size 1"))),
    Layout(
        "two-optimizer-instances",
        4,
        (*DISTRIBUTED, *words("--num-distributed-optimizer-instances 2")),
        needs="einops",
    ),
    Layout("random-init-per-rank", 2, (*DISTRIBUTED, "--data-parallel-random-init")),
    Layout("ep2-tp2", 4, (*EP2, *TP2, *DISTRIBUTED, "--disable-bias-linear"), ranks_per_node=2),
    Layout("ep2-etp1-tp2", 4, (*EP2, *TP2, "--expert-tensor-parallel-size", "1", *DISTRIBUTED)),
    Layout("ep2-pp2", 4, (*EP2, *PP2, *DISTRIBUTED), nodes_lost=(0,)),
    Layout("ep2-replicated", 4, (*EP2, "--bf16")),
    Layout("growing-batch", 2, (*DISTRIBUTED, *words("--rampup-batch-size 4 2 24"))),
    Layout(
        "sgd",
        2,
        words("--bf16 --optimizer sgd"),
    ),
]

OVERLAPPED = words("--overlap-grad-reduce --overlap-param-gather")
MUON = words("--bf16 --optimizer muon")
LAYER_WISE = (*MUON, "--use-distributed-optimizer")
"""Each data-parallel rank updates some matrices, these whole."""


def muon(name: str, ranks: int, *flags: str, ordered: bool = False) -> Layout:
    """A layout whose matrices are updated by Muon.

    If they are ``ordered`` by the ranks that own them, another optimizer shards all else.
    """
    plugins = ("tests.programs.megatron_plugins:provided_model",) if ordered else ()
    return Layout(name, ranks, flags, plugins=plugins, needs="emerging_optimizers")


MUON_LAYOUTS = [
    muon("muon", 2, *MUON),
    muon("muon-layer-wise", 2, *LAYER_WISE),
]
MORE_MUON_LAYOUTS = [
    muon("muon-fp32", 2, "--optimizer", "muon"),
    muon("muon-tp2", 4, *TP2, *MUON, *words("--muon-tp-mode distributed")),
    muon("muon-layer-wise-tp2", 4, *TP2, *LAYER_WISE),
    muon("muon-layer-wise-pp2", 4, *PP2, *LAYER_WISE, *OVERLAPPED),
    muon("muon-layer-wise-ep2", 4, *EP2, *LAYER_WISE, "--disable-bias-linear"),
    muon("muon-ordered-overlapped", 2, *LAYER_WISE, *OVERLAPPED, ordered=True),
    muon("muon-ordered-tp2-alone", 2, *TP2, *LAYER_WISE, ordered=True),
    muon("muon-ordered-dp4", 4, *LAYER_WISE, "--muon-nesterov", ordered=True),
    muon("muon-ordered-tp2", 4, *TP2, *LAYER_WISE, ordered=True),
    muon("muon-ordered-pp2", 4, *PP2, *LAYER_WISE, ordered=True),
    muon("muon-ordered-ep2", 4, *EP2, *LAYER_WISE, "--disable-bias-linear", ordered=True),
]
FOUR_EXPERTS = words("--num-experts 4 --moe-token-dispatcher-type allgather --moe-router-topk 2")
MORE = [
    Layout(
        "global-aux-loss",
        2,
        (
            *FOUR_EXPERTS,
            *words("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2"),
            *words("--moe-input-jitter-eps 0.1 --expert-model-parallel-size 2"),
            *DISTRIBUTED,
        ),
    ),
    Layout(
        "forced-balance",
        2,
        (
            *FOUR_EXPERTS,
            *words("--moe-router-force-load-balancing --disable-bias-linear"),
            *DISTRIBUTED,
        ),
    ),
    Layout(
        "gather-with-step",
        2,
        (
            *VPP,
            *OVERLAPPED,
            *words("--overlap-param-gather-with-optimizer-step --ckpt-format torch"),
            *DISTRIBUTED,
        ),
    ),
    Layout(
        "validated-and-evaluated",
        2,
        (
            *words("--rerun-mode validate_results"),
            *words("--split 90,10,0 --eval-interval 2 --eval-iters 1"),
            *words("--decoupled-lr 5e-4 --decoupled-min-lr 1e-4"),
            *OVERLAPPED,
            *DISTRIBUTED,
            "--untie-embeddings-and-output-weights",
        ),
    ),
    Layout(
        "multi-token-prediction",
        2,
        (
            *words("--mtp-num-layers 1 --calculate-per-token-loss --swiglu --disable-bias-linear"),
            *words("--position-embedding-type rope"),
            *DISTRIBUTED,
        ),
    ),
]


def matrix() -> list[Layout]:
    return [cell(*values) for values in itertools.product(*AXES)]


def table(passed: dict[str, bool]) -> str:
    """The matrix with the outcome of each cell that ran, by layout name."""
    columns = list(itertools.product(OVERLAP, OPTIMIZER))
    lines = [f"{'':17}" + "".join(f"{' '.join(column):>25}" for column in columns)]
    for parallel, precision in itertools.product(PARALLEL, PRECISION):
        names = ["-".join((parallel, precision, *column)) for column in columns]
        outcomes = ["-" if n not in passed else "ok" if passed[n] else "FAILED" for n in names]
        lines.append(f"{parallel:12}{precision:5}" + "".join(f"{o:>25}" for o in outcomes))
    known = {layout.name for layout in matrix()}
    others = [f"{name} {'ok' if ok else 'FAILED'}" for name, ok in passed.items()]
    lines += ["beside: " + ", ".join(o for o in others if o.split()[0] not in known)]
    return "\n".join(lines)
