"""What a rank of a DeepSpeed test runs: plain training, with an SMP that the test plays."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_ft.cli.chaos.trace import final_path, trace_path
from megatron_ft.cli.demo import final_state
from megatron_ft.config import SnapshotConfig
from tests.support.late_capture import (
    LOAD_FROM,
    RESHAPE_FROM,
    SAVE_AT,
    ArenaManager,
    ReshapingManager,
)

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
"""With more threads torch keeps one that a forked rank would lack."""

OWN = "TEST_OWN_CHECKPOINTS"
"""Where DeepSpeed saves a checkpoint of its own beside the snapshot, if it is to."""

SEEDED = "TEST_SEEDED"
"""Set: every step begins with known random states, as DeepSpeed's checkpoints hold none."""

NUMBERS = {False: 1, True: 2}
"""Seeds: an incarnation that restores begins with other weights, so that none can be right by
chance."""

CHECKPOINT, SAVE_CHECKPOINT = "TEST_CHECKPOINT", "TEST_SAVE_CHECKPOINT"
"""Folders: of DeepSpeed's checkpoint that an incarnation without a snapshot begins with, and to
make."""

SECTION = {
    "enabled": True,
    "follows_engine": True,
    "protect": "none",
}
"""What switches snapshots on; which are taken, and of which stripes, the test says."""

STEPS = "TEST_STEPS"
"""Where to end, if not where every other run does."""


def preload() -> None:
    """Import everything that ranks need, in the process that they are forked from."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Else every rank compiles, or waits for, an extension that gloo does not need.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Says no where the processor has no instructions for it; torch computes it all the same.
    type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore[method-assign]
    for module in (
        "deepspeed.comm.torch",
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed_ext.state",
        "tests.programs.deepspeed_models",
    ):
        importlib.import_module(module)
    # Making an optimizer imports as much again as torch itself; asking for Muon, the compiler.
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def make_engine(cell: dict[str, Any]) -> Any:
    """DeepSpeed's engine as the cell says, its generators seeded for this incarnation."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    number = NUMBERS[LOAD_FROM in os.environ or RESHAPE_FROM in os.environ]
    torch.manual_seed(number)
    module, _, function = cell["model"].partition(":")
    keywords = getattr(importlib.import_module(module), function)(cell["options"])
    engine, *_ = deepspeed.initialize(config=cell["config"], **keywords)
    if cell.get("touch") and LOAD_FROM not in os.environ:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.5)
    torch.manual_seed(100 * number + torch.distributed.get_rank())
    return engine


def make_manager(config: SnapshotConfig, engine: Any) -> ArenaManager:
    from deepspeed_ext.attachment import place_of

    return manager_at(config, place_of(engine))


def manager_at(config: SnapshotConfig, place: dict[str, Any]) -> ArenaManager:
    kind = ReshapingManager if RESHAPE_FROM in os.environ else ArenaManager
    return kind(config, place, _weights)


def _weights(state: Any) -> Iterator[torch.Tensor]:
    for parameter in state._engine.module.parameters():
        yield parameter
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor


def train_step(engine: Any) -> list[torch.Tensor]:
    """One optimizer step, whether it is applied or overflows; the losses of its micro-batches."""
    from tests.programs.deepspeed_models import batch

    if SEEDED in os.environ:
        torch.manual_seed(10 * engine.global_steps + torch.distributed.get_rank())
    rank = torch.distributed.get_rank(engine.data_parallel_group)
    size, step = engine.train_micro_batch_size_per_gpu(), engine.global_steps
    losses, micro_steps = [], range(engine.gradient_accumulation_steps())
    batches = (batch(step, micro_step, rank, size) for micro_step in micro_steps)
    if engine.pipeline_parallelism:
        return [engine.train_batch(batches).detach()]
    for tokens, targets in batches:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss), "a run of NaNs equals any other"
        losses.append(loss.detach())
    return losses


def train() -> None:
    """Train as ``sys.argv`` says: the cell, the number of steps, the folder of the trace."""
    from deepspeed_ext import attachment
    from tests.support.deepspeed_final import collect

    attachment.make_manager = make_manager
    cell, folder = json.loads(sys.argv[1]), Path(sys.argv[3])
    steps = int(os.environ.get(STEPS, sys.argv[2]))
    cell["config"]["inmem_snapshot"] = SECTION
    engine = make_engine(cell)
    engine.load_checkpoint(os.environ.get(CHECKPOINT, str(folder / "none")))
    if CHECKPOINT in os.environ and engine.load_universal_checkpoint():
        _count_apart(engine)
    with trace_path(folder, engine.global_rank).open("a") as trace:
        while engine.global_steps < steps:
            losses = train_step(engine)
            if not engine.was_step_applied():
                print(f"step {engine.global_steps} was skipped", flush=True)
            if OWN in os.environ and engine.global_steps == int(os.environ[SAVE_AT]):
                engine.save_checkpoint(os.environ[OWN])
            trace.write(line(engine.global_rank, engine.global_steps, losses))
    if SAVE_CHECKPOINT in os.environ:
        engine.save_checkpoint(os.environ[SAVE_CHECKPOINT])
    final_state.write(final_path(folder, engine.global_rank), collect(engine))
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()


def _count_apart(engine: Any) -> None:
    """Give each sub-group a step of its own: a universal load gives all of them one (0.19.8)."""
    for state in engine.optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def convert() -> None:
    """Run DeepSpeed's own converter to universal checkpoints, with the flags of ``sys.argv``."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(ds_to_universal.parse_arguments())


def line(rank: int, iteration: int, losses: list[torch.Tensor]) -> str:
    line = {
        "rank": rank,
        "incarnation": 0,
        "iteration": iteration,
        "loss": " ".join(float(loss).hex() for loss in losses),
        "samples": [],
        "step_seconds": 0.0,
        "seconds": 0.0,
        "time": 0.0,
    }
    return json.dumps(line) + "\n"
