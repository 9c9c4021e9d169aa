r"""A plain DistributedDataParallel training loop that survives the loss of a node.

    megatron-ft run --nodes 2 --protect xor:2 -- \
        python examples/plain_pytorch.py --iterations 30 --losses losses.jsonl

Started without ``megatron-ft run`` it trains all the same, without snapshots: the two
runs write the same losses and the same final hash, whatever was killed in between.
Rank 0 appends one line per iteration to ``--losses``; iterations that are repeated
after a restore are written again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_ft import RngState, SnapshotConfig, SnapshotManager, run_resilient


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--losses", default="losses.jsonl", help="file that rank 0 appends to")
    parser.add_argument("--width", type=int, default=256, help="size of the hidden layers")
    parser.add_argument("--iteration-seconds", type=float, default=0.0, help="shortest iteration")
    parser.add_argument(
        "--backend",
        help="of torch.distributed (nccl on CUDA, else gloo); gloo lets ranks share a GPU",
    )
    return parser.parse_args()


def join_job(backend: str | None) -> torch.device:
    """Start torch.distributed, with one rank if no launcher set more; this rank's device."""
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, alone)
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_PORT", "0")
    if not torch.cuda.is_available():
        dist.init_process_group(backend or "gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend or "nccl")
    return torch.device("cuda", torch.cuda.current_device())


def build(width: int, device: torch.device) -> dict[str, Any]:
    """Model, optimizer, schedule and generators: everything that training depends on."""
    torch.manual_seed(1234)
    layers = [torch.nn.Linear(32, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    layers += [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.1)]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(width, 32)).to(device)
    # After its first iteration DDP forms its gradient buckets anew, in the order in which
    # gradients arrived, which changes the order of summation.  A restarted run would do so
    # at another iteration; with this flag neither run does, and both agree bit for bit.
    model = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    torch.manual_seed(5678 + dist.get_rank())
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}


def batch(iteration: int, device: torch.device) -> torch.Tensor:
    """The data of one iteration on this rank: a function of nothing else."""
    generator = torch.Generator().manual_seed(1_000_003 * iteration + dist.get_rank())
    return torch.randn(16, 32, generator=generator).to(device)


def train_one(state: dict[str, Any], iteration: int, device: torch.device) -> float:
    """Forward, backward, step; the local loss."""
    data = batch(iteration, device)
    state["optimizer"].zero_grad()
    loss = (state["model"](data) - data.roll(1, dims=1)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    return float(loss.item())


def state_hash(state: dict[str, Any]) -> str:
    """SHA-256 of all weights, buffers and optimizer tensors, bit for bit."""
    digest = hashlib.sha256()
    tensors = list(state["model"].state_dict().values())
    for moments in state["optimizer"].state_dict()["state"].values():
        tensors += [moments[name] for name in sorted(moments)]
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Train, and write losses and the final hash."""
    options = arguments()
    device = join_job(options.backend)
    first, snapshots = 0, None
    if "MEGATRON_FT_JOB" in os.environ:
        replicated = {"model": dist.group.WORLD, "optimizer": dist.group.WORLD}
        snapshots = SnapshotManager(
            SnapshotConfig.from_env(), replicated=replicated, last=options.iterations
        )
    state = build(options.width, device)
    if snapshots is not None:
        first = snapshots.load(into=state)
        snapshots.register_fence(state["optimizer"])
    with open(options.losses if dist.get_rank() == 0 else os.devnull, "a") as losses:
        for iteration in range(first + 1, options.iterations + 1):
            started = time.monotonic()
            loss = train_one(state, iteration, device)
            print(json.dumps({"iteration": iteration, "loss": loss.hex()}), file=losses, flush=True)
            if snapshots is not None:
                snapshots.save(iteration, state)
            time.sleep(max(0.0, started + options.iteration_seconds - time.monotonic()))
        print(json.dumps({"sha256": state_hash(state)}), file=losses, flush=True)
    if snapshots is not None:
        snapshots.close()
    # DistributedDataParallel must not be the last to hold the process group: it would free it with
    # the interpreter's lock held, and gloo's threads, which are joined then, may wait for that.
    state.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Called again in the same process when another rank has failed.
    run_resilient(main)
