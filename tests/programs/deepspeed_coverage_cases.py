"""Programs of ranks: hidden tensors are refused, objects beside the state are named."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn

from deepspeed_ext.state import EngineState
from megatron_ft.checkpoint import framework_state
from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.plan import dtype_name
from megatron_ft.trainer.state import live_tensors
from tests.programs.deepspeed_change_cases import PRECISION, engine_of
from tests.programs.deepspeed_program import train_step
from tests.support.captures import FakeSmp, bits, make_manager
from tests.support.torn import Trial

STAGE = int(sys.argv[2])


class Hiding(nn.Module):
    """Answers for less than it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("extra", torch.ones(3))

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter([])


def late_buffer(engine: Any) -> str:
    """Registered when training runs, in a model that does not tell."""
    module = engine.module
    module.register_buffer("late", torch.zeros(3))
    hidden = {n: b for n, b in module.named_buffers() if n != "late"}
    vars(module)["named_buffers"] = lambda *_, **__: iter(hidden.items())
    return "model/late"


def moved_weight(engine: Any) -> str:
    """A parameter that is no view of the flat weights any more; of ZeRO-3 its partition."""
    weight = engine.module.up.weight
    moved = getattr(weight, "ds_tensor", weight)
    moved.data = moved.data.clone()
    return "model/up.weight"


def average_in_the_optimizer(engine: Any) -> str:
    """Under a key that is no parameter, as some optimizers keep their averages."""
    inner = EngineState(engine).inner_optimizer
    inner.state["average"] = {"up": torch.ones(5)}
    return "optimizer/state/average/up"


HIDDEN: tuple[Callable[[Any], str], ...] = (late_buffer, average_in_the_optimizer)
if STAGE:
    HIDDEN = (*HIDDEN, moved_weight)


def hidden_tensors_are_refused() -> None:
    """By name, where a layout is planned; what they hide in is whole otherwise."""
    for hide in HIDDEN:
        engine = engine_of(STAGE)
        train_step(engine)
        state = EngineState(engine)
        state.require_covered()
        name = hide(engine)
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            make_manager(smp_of(hide.__name__)).prepare(EngineState(engine))
        engine.destroy()


def smp_of(name: str) -> FakeSmp:
    folder = Path(sys.argv[1], name, str(distributed.get_rank()))
    folder.mkdir(parents=True)
    return FakeSmp(folder)


def snapshot_of(engine: Any, name: str, parts: Any = None) -> FakeSmp:
    trial = Trial(smp_of(name), EngineState(engine, parts))
    trial.save()
    trial.settle()
    trial.manager.close()
    assert trial.ended.sealed == [1], trial.ended
    trial.smp.offer_last()
    return trial.smp


def weights(engine: Any) -> dict[str, Any]:
    """All bits of a model, of ZeRO-3 those of its partitions."""
    every = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    return {name: bits(getattr(one, "ds_tensor", one).detach()) for name, one in every.items()}


class Mover:
    """A part of the state that gives a weight other memory when it loads."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, content: Any) -> None:
        moved_weight(self.engine)


def a_restore_fills_what_trains() -> None:
    """Else it is refused before anything trains; with the check switched off nobody would say."""
    engine = engine_of(STAGE)
    train_step(engine)
    smp = snapshot_of(engine, "whole", {"mover": Mover(engine)})
    truth = weights(engine)
    engine.destroy()
    fresh = engine_of(STAGE)
    train_step(fresh)
    train_step(fresh)
    make_manager(smp).load(into=EngineState(fresh))
    assert weights(fresh) == truth
    low = PRECISION[STAGE] != "fp32"
    derived = EngineState(fresh).derived()
    assert ("model/up.weight" in " ".join(derived)) == low, derived.keys()
    assert {dtype_name(one.dtype) for one in derived.values()} <= {"bfloat16"}
    if not STAGE:
        return
    with pytest.raises(ConfigError, match=r"model/up\.weight"):
        make_manager(smp).load(into=EngineState(fresh, {"mover": Mover(fresh)}))
    framework_state.derived_of = lambda *_: {}  # type: ignore[attr-defined]
    make_manager(smp).load(into=EngineState(fresh, {"mover": Mover(fresh)}))
    fresh.destroy()


def frozen_and_trained_come_back() -> None:
    """A layer that is unfrozen, or frozen, behind a start: the snapshot decides, both ways.

    The moments of one that was trained stay while it is frozen.
    """
    engine = engine_of(STAGE)
    layer = engine.module.up
    layer.requires_grad_(False)
    train_step(engine)
    before, then = snapshot_of(engine, "frozen"), weights(engine)
    layer.requires_grad_(True)
    train_step(engine)
    layer.requires_grad_(False)
    train_step(engine)
    frozen_again, last = snapshot_of(engine, "again"), weights(engine)
    layer.requires_grad_(True)
    trained, truth = snapshot_of(engine, "trained"), live_bits(engine)
    engine.destroy()
    for frozen_at_the_start in (True, False):
        for smp, expected, flag in ((before, then, False), (frozen_again, last, False)):
            with restored(smp, frozen_at_the_start) as fresh:
                assert weights(fresh) == expected
                assert fresh.module.up.weight.requires_grad is flag
        with restored(trained, frozen_at_the_start) as fresh:
            assert live_bits(fresh) == truth
            assert fresh.module.up.weight.requires_grad


def live_bits(engine: Any) -> dict[str, Any]:
    return {name: bits(one.detach()) for name, one in live_tensors(EngineState(engine)).items()}


@contextmanager
def restored(smp: FakeSmp, frozen: bool) -> Iterator[Any]:
    """A fresh engine that was filled, its layer frozen before or not; it trains on."""
    fresh = engine_of(STAGE)
    fresh.module.up.requires_grad_(not frozen)
    make_manager(smp).load(into=EngineState(fresh))
    yield fresh
    train_step(fresh)
    fresh.destroy()


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = copy.deepcopy([one.detach() for one in model.buffers()])

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, content: Any) -> None:
        self.shadow = content["shadow"]


def objects_beside_it_are_named() -> None:
    """Objects of the framework are not named; a script's are, once they are in no part."""
    engine = engine_of(STAGE)
    train_step(engine)
    assert EngineState(engine).restart_losses().objects == [], EngineState(engine).restart_losses()
    average, teacher = Average(engine.module), nn.Linear(3, 3)
    second = torch.optim.SGD(teacher.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(second, 2)
    found = EngineState(engine).restart_losses().objects
    assert [one.partition(" ")[0] for one in found] == [
        f"{__name__}.Average",
        "torch.nn.modules.linear.Linear",
        "torch.optim.lr_scheduler.StepLR",
        "torch.optim.sgd.SGD",
    ], found
    engine.module.teacher = teacher
    held = SimpleNamespace(average=average, second=second, schedule=schedule)
    assert EngineState(engine, {"script": held}).restart_losses().objects == []
    engine.destroy()
