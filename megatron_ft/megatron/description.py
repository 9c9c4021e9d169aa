"""What is recorded of a rank once, so that others can read its snapshots without it.

The logical map says where its tensors lie in the unsharded model, the checkpoint form what
Megatron itself would save.  Both come from one sharded state dict, built when training starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import is_not
from typing import Any

import torch

from megatron_ft.checkpoint.form import CheckpointForm
from megatron_ft.core.shard import LogicalPlace, Piece
from megatron_ft.megatron import checkpoint_form, logical_map, save_form
from megatron_ft.megatron.checkpoint_form import RankTensors

logger = logging.getLogger(__name__)

FRAMEWORK = "megatron-core"
_PLAIN = (bool, int, float, str, type(None))


class Description:
    """Logical map (``places``) and checkpoint form (``form``) of one rank.

    Where Megatron cannot describe the model, or saves what no snapshot holds, the form says
    so and a warning says why: snapshots work without it, export does not.
    """

    def __init__(
        self, args: Any, model: Sequence[Any], optimizer: Any, scheduler: Any, tensors: RankTensors
    ) -> None:
        """Describe the rank.  Collective as save_form.build is; nothing of it is raised."""
        self.places: dict[str, LogicalPlace] = {}
        self._args = args
        self._known = dict(vars(args))
        state, problem = b"", ""
        try:
            saved = save_form.build(model, optimizer, scheduler, args)
            pieces = logical_map.model_pieces(saved.tree, tensors.model)
            self.places = _places(pieces, optimizer, tensors)
            state = checkpoint_form.describe(saved, tensors, pieces)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            logger.warning("snapshots of this run cannot be exported: %s", problem)
        rank = torch.distributed.get_rank()
        self.form = CheckpointForm(
            framework=FRAMEWORK,
            release=megatron_version(),
            rank=rank,
            state=state,
            problem=problem,
        ).to_bytes()

    def changed_arguments(self) -> dict[str, Any]:
        """Plain values on Megatron's arguments that are not what the form was made with."""
        now = vars(self._args)
        if list(self._known) != list(now):
            # In the order of now; what was not there then is known as something equal to nothing.
            self._known = {name: self._known.get(name, self) for name in now}
        # Hundreds of arguments, nearly all the very objects that they were: not looked at in turn.
        others = compress(now.items(), map(is_not, now.values(), self._known.values()))
        return {
            name: value
            for name, value in others
            if isinstance(value, _PLAIN) and self._known[name] != value
        }


def _places(
    pieces: Mapping[str, tuple[Piece, ...]], optimizer: Any, tensors: RankTensors
) -> dict[str, LogicalPlace]:
    names = {id(tensor): name for name, tensor in tensors.model.items()}
    return {
        **logical_map.model_places(tensors.captured, pieces),
        **logical_map.optimizer_places(tensors.masters, optimizer, names, pieces),
    }


def megatron_version() -> str:
    """The release of megatron-core, without the commit that a checkout appends."""
    import megatron.core

    return str(megatron.core.__version__).partition("+")[0]
