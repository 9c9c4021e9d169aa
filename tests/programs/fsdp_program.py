"""A rank of a test that trains a small model under FSDP2, with an SMP that the test plays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import shard_id
from megatron_ft.trainer.state import RngState
from tests.support.late_capture import RESHAPE_FROM, ArenaManager, ReshapingManager

ITERATIONS, BATCH = 8, 12
TRACE, MESH = "TEST_TRACE", "TEST_MESH"
"""The folder for losses; the shape of the mesh, with replicas first if it has two numbers."""


def preload() -> None:
    """Importing this module was enough, but for what optimizers import."""
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same model on all ranks, then sharded: rows of 33, 7 and 3, which nothing divides."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7, bias=False)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(7, 3)).double()
    shape = tuple(map(int, os.environ[MESH].split()))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> float:
    """Train on this rank's part of the batch; the loss of all of it."""
    generator = torch.Generator().manual_seed(iteration)
    batch = torch.randn(BATCH, 13, dtype=torch.float64, generator=generator)
    part = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = mse_loss(model(part[:, :10]), part[:, 10:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
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
    """The manager of this rank."""
    rank = dist.get_rank()
    kind = ReshapingManager if RESHAPE_FROM in os.environ else ArenaManager
    place = {"shard_id": shard_id(dp=rank), "rank": rank, "coordinates": ()}
    return kind(SnapshotConfig(), place, lambda state: ())
