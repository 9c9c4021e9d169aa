"""What is trained over pipelines, tensors and experts, and with ZeRO-3: one line, one test."""

from __future__ import annotations

from typing import Any

from tests.support.deepspeed_cells import FP32_GRADIENTS, PRECISION, Cell, zero

MODELS = "tests.programs.deepspeed_parallel_models"
ON_HOST = {"device": "cpu", "pin_memory": False}
PARTS = {"sub_group_size": 400, "stage3_param_persistence_threshold": 40}
"""Sizes at which a model of the tests has several sub-groups, and some parameters persist."""

NONE_PERSISTS = {"stage3_param_persistence_threshold": 0}
"""Under autocast DeepSpeed gathers in 16 bits; parameters that persist it gathers in 32 bits
after a step, but not while a new process records in which order it uses them."""

RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def zero3(precision: str, **more: Any) -> dict[str, Any]:
    return zero(3, precision, **{**PARTS, **more})


def piped(name: str, ranks: int, config: dict[str, Any], **more: Any) -> Cell:
    options = {"layers": 3, "stages": 2}
    return Cell(name, ranks, config, f"{MODELS}:pipeline", options, **more)


def sharded(name: str, config: dict[str, Any], **more: Any) -> Cell:
    return Cell(name, 4, config, f"{MODELS}:sharded", {"tensor": 2}, **more)


def experts(name: str, ranks: list[int], config: dict[str, Any], **more: Any) -> Cell:
    options = {"experts": 4, "ranks": ranks}
    return Cell(name, 4, config, f"{MODELS}:experts", options, **more)


OVERFLOWS = {"fp16": {**PRECISION["fp16"]["fp16"], "initial_scale_power": 22}}

PARALLEL_CELLS = [
    Cell("zero3-bf16", 4, zero3("bf16"), scheme="rs:3+1"),
    Cell("zero3-offload", 2, zero3("bf16", offload_optimizer=ON_HOST, offload_param=ON_HOST)),
    piped("pipeline-zero1-bf16", 4, zero(1, "bf16"), scheme="xor:2"),
    sharded("tensor-zero1-bf16", zero(1, "bf16"), scheme="xor:2"),
    experts("experts-zero2-bf16", [4, 2], zero(2, "bf16"), scheme="rs:3+1"),
]
"""Every kind of parallelism at least once."""

MORE_PARALLEL_CELLS = [
    Cell("zero3-fp32", 2, zero3("fp32")),
    piped("pipeline-fp32", 2, {**zero(0, "fp32"), **RECOMPUTED}),
    Cell("zero3-fp16", 2, zero3("fp16"), skips=True),
    experts("experts-bf16", [2], zero(0, "bf16")),
    Cell("zero3-autocast", 2, {**zero3("fp32", **NONE_PERSISTS), **AUTOCAST}),
    Cell("zero3-secondary", 4, zero3("bf16", zero_hpz_partition_size=2)),
    piped("pipeline-bf16", 4, zero(0, "bf16")),
    piped("pipeline-zero1-fp16", 2, {**zero(1, "fp16"), **OVERFLOWS}, skips=True),
    piped("pipeline-zero1-fp32-gradients", 4, {**zero(1, "bf16"), **FP32_GRADIENTS, **RECOMPUTED}),
    sharded("tensor-zero3-fp32", zero3("fp32")),
    experts("experts-zero1-fp32", [2], zero(1, "fp32")),
]
"""Other ways to the same; with --all-layouts."""

UNIVERSAL_CELLS = [Cell("zero3-bf16", 2, zero3("bf16")), Cell("zero1-bf16", 2, zero(1, "bf16"))]
"""Trained on from universal checkpoints; with --all-layouts."""
