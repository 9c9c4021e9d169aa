"""The states of all random number generators, as something to put into the state mapping."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RngState:
    """Generators of Python, numpy, torch on the CPU, and torch on the current accelerator.

    Follows the Stateful protocol: ``SnapshotManager.save(i, {"rng": RngState(), ...})``
    captures them at the iteration boundary and a load sets them.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as of now."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them; an accelerator's state is left out where there is no accelerator."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"].cpu())
