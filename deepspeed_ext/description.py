"""What is recorded of a rank once, so that others can read its snapshots without it.

The logical map says where its tensors lie in the unsharded model, the checkpoint form what
DeepSpeed itself would save.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext import checkpoint_form
from deepspeed_ext.checkpoint_form import places
from deepspeed_ext.optimizers.view import OptimizerView
from megatron_ft.checkpoint.export import CheckpointForm
from megatron_ft.core.shard import LogicalPlace

logger = logging.getLogger(__name__)

FRAMEWORK = "deepspeed"


class Description:
    """Logical map (``places``) and checkpoint form (``form``) of one rank.

    Where DeepSpeed saves what no snapshot holds, the form says so and a warning says why:
    snapshots work without it, export does not.
    """

    def __init__(
        self, engine: Any, view: OptimizerView, captured: Mapping[str, torch.Tensor]
    ) -> None:
        """``captured`` are the tensors of a snapshot by name.  Nothing is raised."""
        self.places: dict[str, LogicalPlace] = {}
        state, problem = b"", ""
        try:
            self.places = places(engine, view, captured)
            state = checkpoint_form.describe(engine, view, captured)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            logger.warning("snapshots of this run cannot be exported: %s", problem)
        self.form = CheckpointForm(
            framework=FRAMEWORK,
            release=deepspeed_version(),
            rank=torch.distributed.get_rank(),
            state=state,
            problem=problem,
        ).to_bytes()


def deepspeed_version() -> str:
    """The release of DeepSpeed, without the commit that a build from source appends."""
    import deepspeed

    return str(deepspeed.__version__).partition("+")[0]
