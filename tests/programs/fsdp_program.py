"""A rank of a test that trains a small model under FSDP2, with an SMP that the test plays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import shard_id
from megatron_ft.trainer.state import RngState
from tests.support.late_capture import RESHAPE_FROM, ArenaManager, ReshapingManager

ITERATIONS, BATCH = 8, 12
TRACE, MESH, WAY = "TEST_TRACE", "TEST_MESH", "TEST_WAY"
"""The folder for losses; the shape of the mesh, with replicas first if it has two numbers; what is
to be other than usual: "mixed" precision, "offloaded", "accumulated" or "tensor" parallel."""
MICRO_BATCHES = 2


def preload() -> None:
    """Importing this module was enough, but for what optimizers import."""
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same model on all ranks, then sharded: rows of 33, 7 and 3, which nothing divides."""
    torch.manual_seed(3)
    hidden = 34 if os.environ.get(WAY) == "tensor" else 33
    layers = [torch.nn.Linear(10, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 7, bias=False)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(7, 3))
    shape, way = tuple(map(int, os.environ[MESH].split())), os.environ.get(WAY, "")
    names = ("replicas", "shards")[-len(shape) :] if way != "tensor" else ("shards", "tensors")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {}
    if way == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    else:
        model.double()
    if way == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if way == "tensor":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallel: Any = parallelize_module(model, mesh["tensors"], plan)
        model, mesh = parallel, mesh["shards"]
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, **options)
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, iteration: int) -> float:
    """Train on this rank's part of the batch; the loss of all of it."""
    generator = torch.Generator().manual_seed(iteration)
    batch = torch.randn(BATCH, 13, dtype=next(model.parameters()).dtype, generator=generator)
    # Ranks of one tensor-parallel group see the same samples.
    width = 2 if os.environ.get(WAY) == "tensor" else 1
    part = batch.chunk(dist.get_world_size() // width)[dist.get_rank() // width]
    optimizer.zero_grad()
    total = torch.zeros((), dtype=batch.dtype)
    micros = MICRO_BATCHES if os.environ.get(WAY) == "accumulated" else 1
    for number, micro in enumerate(part.chunk(micros)):
        model.set_requires_gradient_sync(number == micros - 1)
        loss = mse_loss(model(micro[:, :10]), micro[:, 10:]) / micros
        loss.backward()
        total += loss.detach()
    optimizer.step()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train() -> None:
    """Train from where a snapshot was, or from the start, and write losses and whole weights."""
    dist.init_process_group("gloo")
    model, optimizer = build()
    progress: dict[str, Any] = {"iteration": 0}
    rng = RngState()
    state = {"model": model, "optimizer": optimizer, "progress": progress, "rng": rng}
    manager = make_manager()
    manager.load(into=state)
    assert progress["iteration"] == max(manager.offered_iteration, 0)
    manager.register_fence(optimizer)
    losses, drawn = {}, float(torch.rand(()))
    for iteration in range(progress["iteration"] + 1, ITERATIONS + 1):
        losses[iteration] = step(model, optimizer, iteration)
        progress["iteration"] = iteration
        manager.save(iteration, state)
    manager.close()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    result = {"losses": losses, "drawn": drawn, "whole": {n: v.tolist() for n, v in whole.items()}}
    folder = Path(os.environ[TRACE])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def make_manager() -> ArenaManager:
    rank = dist.get_rank()
    kind = ReshapingManager if RESHAPE_FROM in os.environ else ArenaManager
    place = {"shard_id": shard_id(dp=rank), "rank": rank, "coordinates": ()}
    return kind(SnapshotConfig(), place, lambda state: ())
