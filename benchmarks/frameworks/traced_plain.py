"""examples/plain_pytorch.py, with a trace and its final state.

python -m benchmarks.frameworks.traced_plain FLAGS OF THE EXAMPLE...

The trace goes to $MEGATRON_FT_CHAOS_TRACE.  Under torchrun alone an incarnation is a restart of it.
"""

from __future__ import annotations

import os
import random
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_ft import run_resilient
from megatron_ft.cli.chaos.trace import VARIABLE, TraceWriter, final_path
from megatron_ft.cli.demo import final_state
from megatron_ft.core.environment import INCARNATION

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"


class TracedExample:
    """Stands for the example's functions that train one iteration and look at the end."""

    def __init__(self, example: Any, folder: Path) -> None:
        self._train_one, self._hash, self._folder = example.train_one, example.state_hash, folder
        self._trace: TraceWriter | None = None
        example.train_one, example.state_hash = self.train_one, self.state_hash

    def train_one(self, state: dict[str, Any], iteration: int, device: torch.device) -> float:
        """Train one iteration, and write its line."""
        if self._trace is None or iteration == 1:  # ranks are known only now
            self._trace = TraceWriter(self._folder, torch.distributed.get_rank())
        started = time.perf_counter()
        loss: float = self._train_one(state, iteration, device)
        self._trace.record(iteration, loss, started)
        return loss

    def state_hash(self, state: dict[str, Any]) -> str:
        """The example's hash; all that the rank holds is written."""
        kept = {name: final_state.plain(state[name].state_dict()) for name in state}
        kept["device"] = str(next(state["model"].parameters()).device)
        rank = torch.distributed.get_rank()
        final_state.write(final_path(self._folder, rank), kept)
        found: str = self._hash(state)
        return found


def main() -> None:
    """Train as the example does."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.environ.setdefault(INCARNATION, str(int(restarts) + 1))
    torch.set_num_threads(1)
    # The example holds these generators in its state, and draws from torch's only.
    random.seed(1)
    numpy.random.seed(1)
    spec = spec_from_file_location("plain_pytorch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    TracedExample(example, Path(os.environ[VARIABLE]))
    run_resilient(example.main)


if __name__ == "__main__":
    main()
