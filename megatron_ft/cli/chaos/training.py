"""A small data-parallel training that writes down, for every rank and iteration, what it had.

    python -m megatron_ft.cli.chaos.training --iterations N --seconds S [--stop FILE] [--resilient]

`megatron-ft chaos` trains this unless it is given a command.  Everything that can go wrong in a
restore shows in the digests: weights and moments that all ranks share, a buffer and random
numbers that each rank has for itself, and the gradient in which they meet.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft import SnapshotConfig, SnapshotManager, run_resilient
from megatron_ft.cli.chaos.trace import Trace
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.state import RngState

WIDTH = 96

ENDS = {"": True, "early": False, "unknown": None}
"""The end that ranks report at the file to stop, by its text: if their plan is done."""


def build(rank: int) -> dict[str, Any]:
    torch.manual_seed(1234)
    layers = [torch.nn.Linear(32, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(5678 + rank)
    return {"model": model, "optimizer": optimizer, "own": torch.zeros(64), "rng": RngState()}


def train_one(state: dict[str, Any], iteration: int, rank: int, stop: bool) -> tuple[float, bool]:
    generator = torch.Generator().manual_seed(1_000_003 * iteration + rank)
    data = torch.randn(16, 32, generator=generator)
    state["optimizer"].zero_grad()
    loss = (state["model"](data) - data.roll(1, dims=1)).square().mean()
    loss.backward()
    parameters = list(state["model"].parameters())
    flat = torch.cat([p.grad.view(-1) for p in parameters] + [torch.tensor([float(stop)])])
    dist.all_reduce(flat)
    offset = 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()]
        parameter.grad.copy_(part.view_as(parameter))
        offset += parameter.numel()
    state["optimizer"].step()
    state["own"].mul_(0.5).add_(torch.rand(64))
    return float(loss.item()), bool(flat[-1] > 0)


def digest(state: dict[str, Any]) -> str:
    """A digest of all tensors of this rank and of its generator, bit for bit."""
    taken = hashlib.blake2b(digest_size=12)
    tensors = [*state["model"].state_dict().values(), state["own"], torch.get_rng_state()]
    for moments in state["optimizer"].state_dict()["state"].values():
        tensors += [moments[name] for name in sorted(moments)]
    for tensor in tensors:
        taken.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return taken.hexdigest()


def main() -> None:
    """Train; with --resilient survivors of a failure restart in their process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="shortest iteration")
    parser.add_argument("--stop", type=Path, help="file at which training ends")
    parser.add_argument("--resilient", action="store_true", help="restart in process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.resilient:
        run_resilient(lambda: enter(options))
    else:
        enter(options)


def enter(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    trace = Trace.from_env(dist.get_rank())
    try:
        train(options, trace)
    finally:
        trace.close()
    dist.destroy_process_group()


def train(options: argparse.Namespace, trace: Trace) -> None:
    rank = dist.get_rank()
    state = build(rank)
    iteration, snapshots = 0, None
    if "MEGATRON_FT_JOB" in os.environ and "MEGATRON_FT_NODE_DIR" in os.environ:
        replicated = {"model": dist.group.WORLD, "optimizer": dist.group.WORLD}
        snapshots = SnapshotManager(SnapshotConfig.from_env())
        followed = MappingState(state, replicated=replicated)
        iteration = snapshots.load(into=followed)
        trace.started(iteration)
        snapshots.register_fence(state["optimizer"])
    last = False
    while iteration < options.iterations and not last:
        iteration, started = iteration + 1, time.monotonic()
        stop = options.stop is not None and options.stop.exists()
        loss, last = train_one(state, iteration, rank, stop)
        trace.write(iteration, loss=loss.hex(), state=digest(state))
        if snapshots is not None:
            snapshots.save(iteration, followed)
        time.sleep(max(0.0, started + options.seconds - time.monotonic()))
    if snapshots is not None:
        snapshots.close(finished=ENDS[options.stop.read_text()] if last else True)


if __name__ == "__main__":
    main()
