"""Where training stands in its data: DeepSpeed's loaders by themselves, others if wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from deepspeed_ext.resumable_loader import ResumableLoader, positions, set_positions

NAME = "data"
"""Name of :class:`DataPosition` among the parts of a snapshot."""

_KNOWN_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler)


def watch(engine: Any) -> None:
    """Put a ResumableLoader in the place of each training loader that DeepSpeed makes.

    To be called before the script gets ``engine.training_dataloader``; a pipeline engine makes
    its own only later, through ``engine.deepspeed_io``.  A second call changes nothing.
    """
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader

    loader = engine.training_dataloader
    if isinstance(loader, DeepSpeedDataLoader):
        engine.training_dataloader = ResumableLoader(loader)
    if "deepspeed_io" not in vars(engine):
        # Not setattr: an engine is a Module, which looks at each value that it is given.
        vars(engine)["deepspeed_io"] = _watching(engine.deepspeed_io)


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


class DataPosition:
    """The part of a snapshot that holds the positions of all ResumableLoaders of this rank."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        watch(engine)

    def state_dict(self) -> dict[str, Any]:
        """By name of the loader; see ResumableLoader."""
        return positions()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a loader that the script makes later is set when it is made."""
        set_positions(state)

    def warning(self) -> str:
        """What a script that has loaders of its own should know, '' if all are watched."""
        loader = getattr(self._engine, "training_dataloader", None)
        loader = getattr(loader, "loader", loader)
        watched = isinstance(loader, ResumableLoader) or (loader is None and positions())
        if watched or not _reads_data(self._engine):
            return ""
        return (
            "the position in the data is not captured: the script reads them through a loader of "
            "its own. Give training_data to deepspeed.initialize, or wrap the loader: "
            "deepspeed_ext.ResumableLoader(loader); nothing is needed where the data follow from "
            "engine.global_steps"
        )


def _reads_data(engine: Any) -> bool:
    # Between the ends of a pipeline no stage reads.
    stages = [getattr(engine, name, None) for name in ("is_first_stage", "is_last_stage")]
    return any(stage() for stage in stages if stage) if any(stages) else True
