"""What is trained with DeepSpeed in the tests: one line is one more test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODELS = "tests.programs.deepspeed_models"


@dataclass(frozen=True)
class Cell:
    """A model, DeepSpeed's configuration of it, and what protects its ranks.

    ``model`` is "module:function" of what makes the keywords of ``deepspeed.initialize`` from
    ``options``; the optimizer is in ``config``.  ``skips`` says that steps overflow before and
    after the snapshot, ``touch`` that weights are changed before training, without the optimizer.
    """

    name: str
    ranks: int
    config: Mapping[str, Any]
    model: str = "tests.programs.deepspeed_models:small"
    options: Mapping[str, Any] = field(default_factory=dict)
    scheme: str = "none"
    ranks_per_node: int = 1
    nodes_lost: tuple[int, ...] = (1,)
    skips: bool = False
    touch: bool = False


BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 10,
            "warmup_min_lr": 1e-4,
            "warmup_max_lr": 1e-2,
            "warmup_num_steps": 3,
        },
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

# Large enough to overflow at once, and again after two good steps: steps are skipped before
# and after the snapshot.
OVERFLOWING = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
PRECISION: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": OVERFLOWING},
    "fp32": {},
}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With ZeRO-1 and bf16 DeepSpeed takes another optimizer for this: BF16_Optimizer."""


def zero(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    """The configuration of a ZeRO stage and a precision; ``more`` is in the stage's section."""
    return {**BASE, **PRECISION[precision], "zero_optimization": {"stage": stage, **more}}


EXPLODES = {"explodes": (3, 7, 13)}
"""Forward passes, two a step.  Without ZeRO, DeepSpeed 0.19 does not scale the loss, whatever the
scale is, so that nothing overflows by itself."""

UNUSED = {"bypasses": (5, 6, 9, 10)}
"""Steps in which some weights have no gradient, one of them the first after the snapshot."""

UNUSED_AT_FIRST = {"bypasses": (9,)}
"""Some weights have a gradient in the second micro-batch behind the snapshot alone."""

EXPLODE_FIRST = {"explodes": tuple(range(1, 11))}
"""Until after the snapshot no step is applied."""

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
RS: dict[str, Any] = {"ranks": 4, "scheme": "rs:3+1"}

MATRIX = [
    Cell(
        f"zero{stage}-{precision}",
        2,
        zero(stage, precision),
        options=EXPLODES if precision == "fp16" and not stage else {},
        scheme="xor:2" if precision == "bf16" else "none",
        skips=precision == "fp16",
    )
    for stage in (0, 1, 2)
    for precision in PRECISION
]

CELLS = [
    *(cell for cell in MATRIX if cell.name == "zero2-fp16" or cell.name.endswith("bf16")),
    Cell(
        "zero1-bf16-fp32-gradients",
        2,
        {**zero(1, "bf16"), **FP32_GRADIENTS},
        options=EXPLODES,
        skips=True,
    ),
    Cell("zero1-bf16-offloaded", 2, zero(1, "bf16", **OFFLOADED)),
    Cell("zero2-bf16-unused", 2, zero(2, "bf16"), options=UNUSED),
    Cell("zero2-bf16-offloaded-unused", 2, zero(2, "bf16", **OFFLOADED), options=UNUSED),
    Cell("zero3-lion", 2, zero(3, "bf16"), model=f"{MODELS}:with_lion"),
    Cell("zero0-rmsprop", 2, zero(0, "fp32"), model=f"{MODELS}:with_rmsprop"),
    Cell("zero0-fp16-touched", 2, zero(0, "fp16"), options=EXPLODE_FIRST, touch=True),
    Cell(
        "zero2-bf16-offloaded-host-adam",
        2,
        zero(2, "bf16", **OFFLOADED),
        model="tests.programs.deepspeed_models:with_host_adam",
    ),
    Cell("zero2-fp32-node-loss", config=zero(2, "fp32"), **RS),
]
"""Every optimizer, and everything that a state may forget, at least once."""

MORE_CELLS = [
    *(cell for cell in MATRIX if cell not in CELLS),
    Cell("zero2-fp32-offloaded", 2, zero(2, "fp32", **OFFLOADED)),
    Cell("zero2-fp16-offloaded", 2, zero(2, "fp16", **OFFLOADED), skips=True),
    Cell("zero1-fp16-touched", 2, zero(1, "fp16"), options=EXPLODE_FIRST, touch=True),
    Cell("zero1-offloaded-at-first", 2, zero(1, "bf16", **OFFLOADED), options=UNUSED_AT_FIRST),
    Cell("zero2-adagrad", 2, zero(2, "bf16"), model=f"{MODELS}:with_adagrad"),
    Cell("zero2-bf16-round-robin", 2, zero(2, "bf16", round_robin_gradients=True)),
    Cell("zero1-bf16-node-loss", config=zero(1, "bf16"), **RS),
]
"""Other ways to the same; with --all-layouts."""
