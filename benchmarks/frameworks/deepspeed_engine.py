"""DeepSpeed's engine on the CPU, with ZeRO 0 and torch's AdamW.

python -m benchmarks.frameworks.deepspeed_engine OUT CAPTURES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.blocks import model, samples
from benchmarks.frameworks.save_calls import SaveCalls

CONFIG: dict[str, Any] = {
    "train_batch_size": 1,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "inmem_snapshot": {"enabled": True},
}


def main() -> None:
    """Train until enough snapshots were captured."""
    out, captures = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    calls = SaveCalls(captures)
    module = model()
    engine, *_ = deepspeed.initialize(
        model=module, config=CONFIG, model_parameters=list(module.parameters())
    )
    engine.load_checkpoint(str(out.parent / "checkpoints"))
    while not calls.enough:
        engine.backward(engine(samples()).square().mean())
        engine.step()
    calls.write(out, f"DeepSpeed {deepspeed.__version__}, ZeRO 0, torch's AdamW, on the CPU")
    engine.destroy()


if __name__ == "__main__":
    main()
