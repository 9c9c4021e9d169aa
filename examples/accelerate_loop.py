r"""A training loop of Hugging Face Accelerate that survives the loss of a node.

    megatron-ft run --nodes 4 --spares 1 --protect rs:3+1 -- \
        python examples/accelerate_loop.py --iterations 40 --losses losses.jsonl

It trains with DistributedDataParallel, on GPUs with ``--fsdp2`` with FSDP2.  Started without
``megatron-ft run`` it trains all the same, without snapshots: the two runs write the same losses
and the same final hash, whatever was killed in between.
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
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

from megatron_ft import InMemoryState, run_resilient

SAMPLES, BATCH, FEATURES = 240, 6, 31


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--losses", default="losses.jsonl", help="file that rank 0 appends to")
    parser.add_argument("--width", type=int, default=257, help="size of the hidden layers")
    parser.add_argument("--iteration-seconds", type=float, default=0.0, help="shortest iteration")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model")
    return parser.parse_args()


class Seen:
    """The number of samples that this rank has trained on; registered with the Accelerator."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        """The number."""
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set it."""
        self.samples = state["samples"]


def network(width: int) -> torch.nn.Module:
    """The same on all ranks, with dropout, which draws from the random states."""
    torch.manual_seed(1234)
    layers = [torch.nn.Linear(FEATURES, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    layers += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, FEATURES))


def state_hash(accelerator: Accelerator, seen: Seen) -> str:
    """SHA-256 of what all ranks hold: weights, moments, schedule, random states, samples."""
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for moments in optimizer.state_dict()["state"].values():
        tensors += [moments[name] for name in sorted(moments)]
    rates = [schedule.get_last_lr() for schedule in accelerator._schedulers]
    digest = hashlib.sha256(repr((rates, seen.samples, accelerator.step)).encode())
    for tensor in tensors:
        flat = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    every: list[Any] = [digest.hexdigest()]
    if accelerator.use_distributed:
        every = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(every, digest.hexdigest())
    return hashlib.sha256("".join(every).encode()).hexdigest()


def main() -> None:
    """Train, and write losses and the final hash."""
    options = arguments()
    # Without the flag, DDP forms its gradient buckets anew after the first iteration of each
    # start, and a restarted run adds up gradients in another order than an uninterrupted one.
    same_order = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp2 else None,
        kwargs_handlers=[same_order],
    )
    model = network(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    data = DataLoader(TensorDataset(torch.randn(SAMPLES, FEATURES)), BATCH, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    torch.manual_seed(5678 + accelerator.process_index)
    memory = InMemoryState(accelerator) if "MEGATRON_FT_JOB" in os.environ else None
    step = 0 if memory is None else memory.resume()
    with open(options.losses if accelerator.is_main_process else os.devnull, "a") as losses:
        while step < options.iterations:
            for (batch,) in data:
                started = time.monotonic()
                optimizer.zero_grad()
                loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                step, seen.samples = step + 1, seen.samples + len(batch)
                line = {"iteration": step, "loss": loss.item().hex()}
                print(json.dumps(line), file=losses, flush=True)
                if memory is not None:
                    memory.save()
                time.sleep(max(0.0, started + options.iteration_seconds - time.monotonic()))
                if step == options.iterations:
                    break
        print(json.dumps({"sha256": state_hash(accelerator, seen)}), file=losses, flush=True)
    if memory is not None:
        memory.close(finished=True)
    # The process group must outlive the model: see examples/plain_pytorch.py.
    del model, optimizer, data, schedule
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    # Called again in the same process when another rank has failed.
    run_resilient(main)
