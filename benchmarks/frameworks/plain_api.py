"""A module and its AdamW under the plain API.

python -m benchmarks.frameworks.plain_api OUT CAPTURES DEVICE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.frameworks.blocks import model, samples
from benchmarks.frameworks.save_calls import SaveCalls
from megatron_ft import SnapshotConfig, SnapshotManager


def main() -> None:
    """Train until enough snapshots were captured."""
    out, captures, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    calls = SaveCalls(captures)
    module, inputs = model().to(device), samples(device)
    optimizer = torch.optim.AdamW(module.parameters())
    manager = SnapshotManager(SnapshotConfig.from_env())
    state = {"model": module, "optimizer": optimizer}
    iteration = manager.load(into=state)
    manager.register_fence(optimizer)
    while not calls.enough:
        iteration += 1
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(iteration, state)
    calls.write(out, "plain API")
    manager.close()


if __name__ == "__main__":
    main()
