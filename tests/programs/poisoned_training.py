"""examples/plain_pytorch.py, whose weights go wrong when files in a folder say so.

MEGATRON_FT_TEST_POISON names the folder.  ``poison`` holds an iteration: there, in the job's first
incarnation, a weight becomes wrong on all ranks.  While ``fail`` exists, training with that weight
raises.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"
WRONG = 1000.0


def load() -> Any:
    spec = importlib.util.spec_from_file_location("plain_pytorch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def poisoned(train_one: Any, folder: Path) -> Any:
    """The example's training step with the faults of this file."""
    first_incarnation = os.environ["MEGATRON_FT_INCARNATION"] == "1"

    def step(state: dict[str, Any], iteration: int, device: Any) -> float:
        loss = float(train_one(state, iteration, device))
        weight = next(state["model"].parameters()).data.view(-1)
        poison = folder / "poison"
        if first_incarnation and poison.exists() and poison.read_text() == str(iteration):
            weight[0] = WRONG
        if weight[0] > WRONG / 2 and (folder / "fail").exists():
            sys.exit("the loss has diverged")
        return loss

    return step


def main() -> None:
    training = load()
    folder = Path(os.environ["MEGATRON_FT_TEST_POISON"])
    training.train_one = poisoned(training.train_one, folder)
    training.main()


if __name__ == "__main__":
    main()
