"""The part of a snapshot that holds the data position: DeepSpeed's loaders by themselves, others if
wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from megatron_ft.trainer.loader_position import SHARED_ANEW
from megatron_ft.trainer.resumable_loader import ResumableLoader, positions, set_positions

NAME = "data"
"""Name of :class:`DataPosition` among the parts of a snapshot."""

_KNOWN_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler)


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.runtime.constants import ROUTE_TRAIN

    signature = inspect.signature(original)

    def deepspeed_io(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        sampler = given.arguments["data_sampler"]
        loader = original(*args, **kwargs)
        # A sampler of the user's own may know its position itself; he can wrap the loader.
        known = sampler is None or type(sampler) in _KNOWN_SAMPLERS
        return (
            ResumableLoader(loader) if given.arguments["route"] == ROUTE_TRAIN and known else loader
        )

    return deepspeed_io


def shared_anew(state: Mapping[str, Any], batches: tuple[int, int]) -> dict[str, Any]:
    """Positions from a state of :class:`DataPosition` for a job of another number of ranks.

    ``batches`` are those that a rank reads in a step, now and before.
    """
    return {name: {**position, SHARED_ANEW: batches} for name, position in state.items()}


class DataPosition:
    """The part of a snapshot that holds the positions of all ResumableLoaders of this rank.

    It puts one in the place of each training loader that DeepSpeed makes.  To be made before the
    script gets ``engine.training_dataloader``; a pipeline engine makes its own only later, through
    ``engine.deepspeed_io``.
    """

    def __init__(self, engine: Any) -> None:
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader

        self._engine = engine
        loader = engine.training_dataloader
        if isinstance(loader, DeepSpeedDataLoader):
            engine.training_dataloader = ResumableLoader(loader)
        if "deepspeed_io" not in vars(engine):
            # Not setattr: an engine is a Module, which looks at each value that it is given.
            vars(engine)["deepspeed_io"] = _watching(engine.deepspeed_io)

    def state_dict(self) -> dict[str, Any]:
        return positions()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_positions(state)

    def warning(self) -> str:
        """A warning for a script that has loaders of its own, '' if all are watched."""
        engine = self._engine
        loader = getattr(engine, "training_dataloader", None)
        loader = getattr(loader, "loader", loader)
        watched = isinstance(loader, ResumableLoader) or (loader is None and positions())
        # Between the ends of a pipeline no stage reads.
        reads = not engine.pipeline_parallelism or engine.is_first_stage() or engine.is_last_stage()
        if watched or not reads:
            return ""
        return (
            "the position in the data is not captured: the script reads them through a loader of "
            "its own. Give training_data to deepspeed.initialize, or wrap the loader: "
            "deepspeed_ext.ResumableLoader(loader); nothing is needed where the data follow from "
            "engine.global_steps"
        )
