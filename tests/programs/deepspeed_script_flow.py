"""What a rank of the tests of starts runs: a user's script, as its argument (JSON) says.

Everything goes through the hook, as for users; only the SMP is the test's.  What the script
has seen goes to ``seen<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron_ft.core.errors import ConfigError
from tests.programs import deepspeed_models
from tests.programs.deepspeed_program import NUMBERS, make_manager, train_step
from tests.support.late_capture import LOAD_FROM


def run() -> None:
    """Do what the argument says; errors are noted as well."""
    told = json.loads(sys.argv[1])
    seen: dict[str, Any] = {"losses": {}}
    for plugin in told.get("plugins", ()):
        globals()[plugin]()
    try:
        _script(told, seen)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[2], f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))


def _script(told: dict[str, Any], seen: dict[str, Any]) -> None:
    import deepspeed
    from deepspeed.runtime.dataloader import RepeatingLoader

    from deepspeed_ext import attachment

    attachment.make_manager = make_manager
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(NUMBERS[LOAD_FROM in os.environ])
    make = getattr(deepspeed_models, told.get("model", "small"))
    keywords = reading(told["reads"]) if "reads" in told else make({})
    engine, _, loader, _ = deepspeed.initialize(config=told["config"], **keywords)
    torch.manual_seed(100 * NUMBERS[LOAD_FROM in os.environ] + torch.distributed.get_rank())
    seen["replaced"] = sorted({"step", "load_checkpoint", "save_checkpoint"} & vars(engine).keys())
    if told.get("peeks"):
        next(iter(loader))
    for load in told.get("loads", ()):
        path, client_state = engine.load_checkpoint(**load)
        own = {k: v for k, v in (client_state or {}).items() if k in ("step", "epoch")}
        seen.setdefault("loads", []).append([path and Path(path).parent.name, own])
    first = told.get("first_read")
    if first:
        seen["first_read"] = FIRST_READS[first](engine)
        torch.distributed.barrier()
    seen["begins_at"] = engine.global_steps
    other: Any = None
    if second := told.get("second_engine"):
        config = {k: v for k, v in told["config"].items() if k != "inmem_snapshot"}
        config = told["config"] if second == "same" else config
        if told.get("destroys"):
            engine.destroy()
        other, *_ = deepspeed.initialize(config=config, **make({}))
        seen["others"] = sorted({"step", "load_checkpoint"} & vars(other).keys())
        engine = other if told.get("destroys") else engine
    batches = iter(RepeatingLoader(loader)) if told.get("reads") == "engine" else None
    schedule = told.get("schedule") and _schedule(engine)
    for _ in steps_of(engine, told):
        try:
            losses = step_on(engine, batches) if "reads" in told else train_step(engine)
            if schedule:
                schedule.step()
        except ConfigError as error:
            if not told.get("goes_on"):
                raise
            seen.setdefault("errors", []).append(str(error))
            continue
        seen["losses"][engine.global_steps] = [float(loss.item()).hex() for loss in losses]
        for save in told.get("saves", {}).get(str(engine.global_steps), ()):
            engine.save_checkpoint(**save)
        for load in told.get("reloads", {}).get(str(engine.global_steps), ()):
            engine.load_checkpoint(**load)
    if first:
        seen["first_read_at_end"] = FIRST_READS[first](engine)
        seen["watched"] = "__getattribute__" in vars(type(engine))
        engine.eval()
        seen["ends_as"] = engine(*Samples().batch()).item().hex()
    engine.destroy()
    torch.distributed.destroy_process_group()


class Samples(Dataset[Any]):
    """Tokens and targets: three steps of two ranks are a pass."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = deepspeed_models.batch(index, 0, 0, 1)
        return tokens[0], targets[0]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of them, to look at the model with."""
        first, second = zip(self[0], self[1], strict=True)
        return torch.stack(first), torch.stack(second)


def steps_of(engine: Any, told: dict[str, Any]) -> Iterator[int]:
    """A number of steps, or those up to one that the engine counts."""
    if "until" not in told:
        yield from range(told.get("steps", 1))
    while engine.global_steps < told.get("until", 0):
        yield engine.global_steps


FIRST_READS: dict[str, Callable[[Any], Any]] = {
    "counter": lambda engine: engine.global_steps,
    "samples": lambda engine: engine.global_samples,
    "skipped": lambda engine: engine.skipped_steps,
    "rate": lambda engine: engine.get_lr(),
    "schedule": lambda engine: engine.lr_scheduler.last_batch_iteration,
    "rank 0 alone": lambda engine: None if engine.global_rank else engine.global_steps,
}


def reading(what: str) -> dict[str, Any]:
    """Keywords of deepspeed.initialize: the script reads from the loader that this makes."""
    from tests.programs.deepspeed_parallel_models import pipeline

    staged = what == "pipeline"
    made = pipeline({"layers": 1, "stages": 2}) if staged else deepspeed_models.small({})
    return {**made, "training_data": Samples()}


def step_on(engine: Any, batches: Any) -> list[torch.Tensor]:
    """One step; a pipeline reads for itself."""
    if batches is None:
        return [engine.train_batch().detach()]
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        losses.append(engine(*next(batches)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.detach() for loss in losses]


def _schedule(engine: Any) -> Any:
    """One that the engine knows nothing of."""
    return torch.optim.lr_scheduler.ExponentialLR(engine.basic_optimizer, 0.5)


def _unwrap() -> Any:
    """DeepSpeed's engine as it is without the hook."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name in ("__init__", "_take_model_step"):
        setattr(DeepSpeedEngine, name, vars(DeepSpeedEngine)[name].__wrapped__)
    return DeepSpeedEngine


def late_hook() -> None:
    """The engine is made before the hook is there."""
    from deepspeed_ext import hooks

    engine = _unwrap()
    initialise = engine.__init__

    def initialise_first(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        hooks.install()

    engine.__init__ = initialise_first


def old_release() -> None:
    """DeepSpeed is one that is too old."""
    import deepspeed

    from deepspeed_ext import hooks

    _unwrap()
    deepspeed.__version__ = "0.17.6"
    hooks.install()


def renamed_parameter() -> None:
    """DeepSpeed's load_checkpoint has lost a parameter."""
    from deepspeed_ext import hooks

    engine = _unwrap()
    original = engine.load_checkpoint

    def load_checkpoint(self: Any, directory: str, tag: Any = None) -> Any:
        return original(self, directory, tag)

    engine.load_checkpoint = load_checkpoint
    hooks.install()
