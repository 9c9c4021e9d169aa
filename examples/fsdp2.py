r"""A plain FSDP2 (``fully_shard``) training loop that survives the loss of a node.

    megatron-ft run --nodes 4 --spares 1 --protect rs:3+1 -- \
        python examples/fsdp2.py --iterations 40 --losses losses.jsonl

Started without ``megatron-ft run`` it trains all the same, without snapshots: the two runs
write the same losses and the same final hash, whatever was killed in between.  Layers have sizes
that no number of ranks divides, and samples come from a DataLoader, over several epochs.
Rank 0 appends one line per iteration to ``--losses``; iterations that are repeated
after a restore are written again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megatron_ft import ResumableLoader, RngState, SnapshotConfig, SnapshotManager, run_resilient

SAMPLES, BATCH, FEATURES = 240, 6, 31


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--losses", default="losses.jsonl", help="file that rank 0 appends to")
    parser.add_argument("--width", type=int, default=257, help="size of the hidden layers")
    parser.add_argument("--iteration-seconds", type=float, default=0.0, help="shortest iteration")
    return parser.parse_args()


def join_job() -> torch.device:
    """Start torch.distributed, with one rank if no launcher set more; this rank's device."""
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, alone)
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_PORT", "0")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


def build(width: int, device: torch.device) -> dict[str, Any]:
    """Model, optimizer, schedule, generators and data: everything that training depends on."""
    torch.manual_seed(1234)
    layers = [torch.nn.Linear(FEATURES, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    layers += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, FEATURES)).to(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    # Behind fully_shard: the optimizer's parameters are the shards.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=7)
    loader = ResumableLoader(DataLoader(data, BATCH, sampler=sampler))
    torch.manual_seed(5678 + dist.get_rank())
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "loader": loader,
        "rng": RngState(),
    }


def batches(loader: Any) -> Iterator[torch.Tensor]:
    """One epoch after the other; behind a restore, first what is left of the interrupted one."""
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch
        epoch += 1


def train_one(state: dict[str, Any], batch: torch.Tensor) -> float:
    """Forward, backward, step; the local loss."""
    state["optimizer"].zero_grad()
    loss = (state["model"](batch) - batch.roll(1, dims=1)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    return float(loss.item())


def state_hash(state: dict[str, Any]) -> str:
    """SHA-256 of all ranks' shards of weights and optimizer tensors, bit for bit."""
    digest = hashlib.sha256()
    tensors = list(state["model"].state_dict().values())
    for moments in state["optimizer"].state_dict()["state"].values():
        tensors += [moments[name] for name in sorted(moments)]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = local.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, digest.hexdigest())
    return hashlib.sha256("".join(every).encode()).hexdigest()


def main() -> None:
    """Train, and write losses and the final hash."""
    options = arguments()
    device = join_job()
    first, snapshots = 0, None
    state = build(options.width, device)
    if "MEGATRON_FT_JOB" in os.environ:
        snapshots = SnapshotManager(SnapshotConfig.from_env(), last=options.iterations)
        first = snapshots.load(into=state)
        snapshots.register_fence(state["optimizer"])
    data = batches(state["loader"])
    with open(options.losses if dist.get_rank() == 0 else os.devnull, "a") as losses:
        for iteration in range(first + 1, options.iterations + 1):
            started = time.monotonic()
            loss = train_one(state, next(data).to(device))
            print(json.dumps({"iteration": iteration, "loss": loss.hex()}), file=losses, flush=True)
            if snapshots is not None:
                snapshots.save(iteration, state)
            time.sleep(max(0.0, started + options.iteration_seconds - time.monotonic()))
        print(json.dumps({"sha256": state_hash(state)}), file=losses, flush=True)
    if snapshots is not None:
        snapshots.close()
    state.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Called again in the same process when another rank has failed.
    run_resilient(main)
