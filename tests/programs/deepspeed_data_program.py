"""Ranks of the tests of data positions: incarnations of one training, on real loaders.

Every incarnation makes its loader anew, behind other seeds; only what a snapshot holds is handed
on.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, RandomSampler

from megatron_ft.core.objects import decode, encode
from tests.programs.deepspeed_program import make_engine
from tests.support.deepspeed_cells import zero

SAMPLES, EPOCHS = 12, 3
Seen = tuple[list[int], float]
"""Samples of a batch, and what the model's generator draws after it."""

Script = Callable[[Any], Iterator[Seen]]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def main() -> None:
    """Run the scenario that ``sys.argv`` names; keep what it saw."""
    folder = Path(sys.argv[2])
    notes = globals()[sys.argv[1]](folder)
    (folder / f"notes{torch.distributed.get_rank()}.json").write_text(json.dumps(notes))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def tiny(options: dict[str, Any]) -> dict[str, Any]:
    return {"model": nn.Linear(2, 2), **options}


def engine_of(options: dict[str, Any] | None = None, **config: Any) -> Any:
    cell = {"model": "tests.programs.deepspeed_data_program:tiny", "options": options or {}}
    return make_engine({**cell, "config": {**zero(1, "fp32"), **config}})


def new_process() -> None:
    """Clear what modules remember between incarnations."""
    from megatron_ft.trainer import resumable_loader

    gc.collect()
    resumable_loader.registered.clear()
    resumable_loader._waiting.clear()
    resumable_loader._numbers = itertools.count()


def in_epochs(loader: Any) -> Iterator[Seen]:
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch.tolist(), torch.rand(()).item()


def repeating(loader: Any) -> Iterator[Seen]:
    from deepspeed.runtime.dataloader import RepeatingLoader

    batches = iter(RepeatingLoader(loader))
    while True:
        yield next(batches).tolist(), torch.rand(()).item()


def incarnations(
    engine: Any, make: Callable[[Any], Any], script: Script, at: int, steps: int
) -> dict[str, list[Seen]]:
    """An uninterrupted run, and one that is interrupted behind its ``at``-th batch.

    ``make`` gets ``deepspeed_io``: DeepSpeed's, or of an engine whose loaders are watched.
    """
    from deepspeed_ext.resumable_loader import DataPosition
    from deepspeed_ext.state_parts import RandomStates

    seed(1)
    original = type(engine).deepspeed_io.__get__(engine)
    whole = list(islice(script(make(original)), steps))
    new_process()
    position, states = DataPosition(engine), RandomStates()
    seed(1)
    running = script(make(engine.deepspeed_io))
    first = list(islice(running, at))
    snapshot = encode((position.state_dict(), states.state_dict()))
    list(islice(running, 2))  # trained on before it fails
    del running
    new_process()
    seed(99)
    running = script(make(engine.deepspeed_io))
    captured = decode(snapshot)
    position.load_state_dict(captured[0])
    states.load_state_dict(captured[1])
    return {"whole": whole, "interrupted": first + list(islice(running, steps - at))}


def loaders(folder: Path) -> dict[str, Any]:
    """DeepSpeedDataLoader with its own sampler and the user's, with and without workers."""
    engine, data = engine_of(), Numbers()

    def loader(**options: Any) -> Callable[[Any], Any]:
        return lambda deepspeed_io: deepspeed_io(data, pin_memory=False, **options)

    def shuffled(workers: int) -> Callable[[Any], Any]:
        # Each incarnation its own sampler, which draws from the generator of the process.
        return lambda deepspeed_io: loader(
            data_sampler=RandomSampler(data), num_local_io_workers=workers
        )(deepspeed_io)

    cases = {
        "deepspeed's sampler": (loader(num_local_io_workers=0), in_epochs, (2, 3, 4)),
        "random sampler": (shuffled(0), in_epochs, (4, 6, 7)),
        "repeating": (shuffled(0), repeating, (4, 6, 15)),
        "workers": (shuffled(2), repeating, (2, 6)),
        "two workers unless told": (loader(), in_epochs, (3, 4)),
    }
    return {
        f"{name} at {at}": incarnations(engine, make, script, at, steps=at + 4)
        for name, (make, script, places) in cases.items()
        for at in places
    }


def training_data(folder: Path) -> dict[str, Any]:
    """A loader that DeepSpeed made from ``training_data`` before the engine is watched."""
    from deepspeed_ext.resumable_loader import DataPosition
    from megatron_ft.trainer.resumable_loader import ResumableLoader

    engine = engine_of({"training_data": Numbers()})
    inner = engine.training_dataloader
    DataPosition(engine)
    engine.set_data_post_process_func(len)
    notes = {
        "is_watched": isinstance(engine.training_dataloader, ResumableLoader),
        "passes_on": inner.post_process_func is len,
        "length": len(engine.training_dataloader),
        "warning": DataPosition(engine).warning(),
    }
    engine.destroy()
    engine = engine_of()
    new_process()
    notes["warning_without"] = DataPosition(engine).warning()
    kept = ResumableLoader([1, 2])
    notes["warning_with_own"] = DataPosition(engine).warning()
    assert len(kept) == 2
    return {**notes, "draws": _draws_behind_a_restore()}


def _draws_behind_a_restore() -> list[list[float]]:
    """What every generator gives, and gives again; that of the tracker changes when it is used."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    from deepspeed_ext.state_parts import RandomStates

    tracker = get_cuda_rng_tracker()
    tracker.add("dropout", 5)

    def draw() -> list[float]:
        with tracker.fork("dropout"):
            forked = torch.rand(()).item()
        return [forked, torch.rand(()).item(), random.random(), np.random.rand()]

    draw()
    state = decode(encode(RandomStates().state_dict()))
    first = draw()
    second = draw()
    tracker.reset()
    seed(3)
    RandomStates().load_state_dict(state)
    again = draw()
    RandomStates().load_state_dict(state)
    return [first, again, draw(), second]


def pipeline(folder: Path) -> dict[str, Any]:
    """Two stages, each of which reads the data: what they read, over two epochs."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from deepspeed_ext.resumable_loader import DataPosition

    incarnations: dict[str, Any] = {"whole": _train_pipeline(5)}
    original = DeepSpeedEngine._configure_checkpointing

    def configure_checkpointing(self: Any) -> None:
        original(self)
        DataPosition(self)

    DeepSpeedEngine._configure_checkpointing = configure_checkpointing
    new_process()
    states: dict[str, Any] = {}

    def capture(engine: Any) -> None:
        states.update(decode(encode(DataPosition(engine).state_dict())))

    first = _train_pipeline(2, after=capture)
    new_process()
    rest = _train_pipeline(3, before=lambda engine: DataPosition(engine).load_state_dict(states))
    return {**incarnations, "interrupted": first + rest, "loaders": sorted(states)}


def _nothing(engine: Any) -> None:
    """Neither before nor after."""


def _train_pipeline(
    steps: int,
    before: Callable[[Any], None] = _nothing,
    after: Callable[[Any], None] = _nothing,
) -> list[list[int]]:
    engine = make_engine(
        {
            "model": "tests.programs.deepspeed_data_program:staged",
            "options": {},
            "config": {**zero(0, "fp32"), "pipeline": {"activation_checkpoint_interval": 0}},
        }
    )
    seen: list[list[int]] = []

    def note(batch: Any) -> Any:
        seen.append(batch[1][:, 0].int().tolist())
        return batch

    engine.set_batch_fn(note)
    before(engine)
    for _ in range(steps):
        engine.train_batch()
    after(engine)
    engine.destroy()
    return seen


class Pairs(Dataset[Any]):
    """Inputs and targets; the target says which sample it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2,), float(index)), torch.full((2,), float(index))


def staged(options: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.pipe import PipelineModule

    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    return {"model": model, "training_data": Pairs()}
