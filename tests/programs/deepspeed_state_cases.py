"""What ranks of tests of EngineState run; an assertion that fails ends the rank with its trace."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import distributed

import megatron_ft
from deepspeed_ext.state import RANDOM, EngineState
from deepspeed_ext.unsupported import refusals
from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer.plan import plan_state
from megatron_ft.trainer.state import host_copy, live_tensors
from tests.programs.deepspeed_models import small
from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.captures import FakeSmp
from tests.support.deepspeed_cells import Cell, zero
from tests.support.torn import Trial


def engine_of(
    stage: int, precision: str, model: str = "tests.programs.deepspeed_models:small"
) -> Any:
    return make_engine(dataclasses.asdict(Cell("case", 0, zero(stage, precision), model=model)))


def replicas_are_shared_out() -> None:
    """Without ZeRO each of two ranks captures half of the large tensors."""
    engine = engine_of(0, "fp32")
    state = EngineState(engine)
    captured = plan_state(state, split_bytes=1024).tensor_bytes
    everything = plan_state(state, split_bytes=10**9).tensor_bytes
    assert 0.5 * everything < captured < 0.6 * everything
    engine.destroy()


def reloading_is_followed() -> None:
    """DeepSpeed's own load makes new moments; these are captured then, under the same names."""
    engine = engine_of(1, "bf16")
    state = EngineState(engine)
    before = live_tensors(state)
    train_step(engine)
    engine.save_checkpoint(sys.argv[1])
    engine.load_checkpoint(sys.argv[1])
    state.rescan()
    after = live_tensors(state)
    assert after.keys() == before.keys()
    assert after["optimizer/0/exp_avg"].data_ptr() != before["optimizer/0/exp_avg"].data_ptr()
    for master in engine.optimizer.single_partition_of_fp32_groups:
        kept = engine.optimizer.optimizer.state[master]["exp_avg"]
        assert kept.data_ptr() in {tensor.data_ptr() for tensor in after.values()}
    engine.destroy()


def moved_states_are_followed() -> None:
    """DeepSpeed's offload_states gives masters other memory; what is trained on is captured."""
    engine = engine_of(2, "bf16")
    train_step(engine)
    state = EngineState(engine)
    before = [master.data_ptr() for master in engine.optimizer.single_partition_of_fp32_groups]
    engine.offload_states()
    engine.reload_states()
    train_step(engine)
    masters = engine.optimizer.single_partition_of_fp32_groups
    assert before != [master.data_ptr() for master in masters], "nothing was moved"
    captured = {tensor.data_ptr() for tensor in live_tensors(state).values()}
    assert {master.data_ptr() for master in masters} <= captured
    engine.destroy()


def batch_sizes_come_back() -> None:
    """A script sets them once on the way, and would not again behind a restore."""
    engine = engine_of(2, "bf16")
    state = EngineState(engine)
    configured = engine.train_batch_size(), engine.gradient_accumulation_steps()
    engine.set_train_batch_size(2 * configured[0])
    objects = state.objects()
    engine.set_train_batch_size(configured[0])
    state.load(objects)
    assert engine.train_batch_size() == 2 * configured[0]
    assert engine.gradient_accumulation_steps() == 2 * configured[1]
    engine.destroy()


def numbers_come_back() -> None:
    """What an optimizer keeps beside tensors is kept for every master, or for none."""
    engine = engine_of(0, "fp32", model="tests.programs.deepspeed_models:with_host_adam")
    train_step(engine)
    state = EngineState(engine)
    objects = state.objects()
    masters = [name for name in state.tensors() if name.endswith("/master")]
    assert objects["numbers"] == {name.removesuffix("/master"): {"step": 1} for name in masters}
    train_step(engine)
    assert {kept["step"] for kept in state.objects()["numbers"].values()} == {2}
    state.load(objects)
    assert {kept["step"] for kept in engine.optimizer.state.values()} == {1}
    engine.destroy()


def numbers_of_the_release_before_are_read() -> None:
    """Which had an entry for every master, though torch's optimizers keep tensors alone."""
    engine = engine_of(0, "fp32")
    train_step(engine)
    state = EngineState(engine)
    objects = state.objects()
    assert objects["numbers"] == {}
    names = [name.removesuffix("/master") for name in state.tensors() if name.endswith("/master")]
    kept = [dict(one) for one in engine.optimizer.state.values()]
    numbers: dict[str, Any]
    for numbers in ({}, {name: {} for name in names}):
        state.load(objects | {"numbers": numbers})
        after = [dict(one) for one in engine.optimizer.state.values()]
        assert all(
            one[key] is more[key] for one, more in zip(kept, after, strict=True) for key in one
        )
    engine.destroy()


def what_is_forgotten_is_found_again() -> None:
    """Whoever asks first, and as it is by then."""
    engine = engine_of(0, "fp32", model="tests.programs.deepspeed_models:with_host_adam")
    train_step(engine)
    state = EngineState(engine)
    names, numbers = state.tensors().keys(), state.objects()["numbers"]
    state.forget_tensors()
    engine.module.mean = torch.rand_like(engine.module.mean)
    assert state.boundary_tensors()["buffer/mean"] is engine.module.mean
    state.forget_tensors()
    assert state.objects()["numbers"] == numbers != {}
    state.forget_tensors()
    assert state.tensors().keys() == names
    engine.destroy()


def frozen_weights_that_move_are_captured_at_the_boundary() -> None:
    """A teacher that follows, in a process of its own: given up once, exact from then on."""
    engine = engine_of(2, "bf16")
    train_step(engine)
    teacher = engine.module.places.weight

    def iterate(_: int) -> None:
        teacher.data = teacher.data * 0.5 + 1.0
        train_step(engine)

    with TemporaryDirectory() as folder:
        trial = Trial(FakeSmp(Path(folder)), EngineState(engine))
        ended = trial.train(iterate, 5)
    assert list(ended.given_up) == [1] and ended.sealed == [2, 3, 4, 5], ended
    assert "frozen/places.weight changed outside of a fence" in ended.given_up[1], ended
    engine.destroy()


def destroyed_engines_are_let_go() -> None:
    """A process that makes one engine after another must not keep them all."""
    from deepspeed_ext.hooks import attach, run_of

    engine = engine_of(1, "bf16")
    os.environ["MEGATRON_FT_PROTECT"] = "none"
    run = weakref.ref(attach(engine))
    assert run() is run_of(engine)
    engine.destroy()
    del engine
    gc.collect()
    assert run() is None, gc.get_referrers(run())


def foreign_objects_are_refused() -> None:
    """Nothing is set from objects of another version, or for an optimizer that is not known."""
    engine = engine_of(2, "bf16")
    state = EngineState(engine)
    with pytest.raises(LayoutMismatchError, match="version 0"):
        state.load(state.objects() | {"version": 0, "training": None})
    engine.destroy()
    engine = engine_of(0, "fp32", model="tests.programs.deepspeed_state_cases:with_adafactor")
    with pytest.raises(ConfigError, match="Adafactor"):
        EngineState(engine)
    engine.destroy()


def with_adafactor(options: dict[str, Any]) -> dict[str, Any]:
    keywords = small(options)
    return {**keywords, "optimizer": torch.optim.Adafactor(keywords["model_parameters"])}


class OwnOptimizer(torch.optim.Optimizer):
    """Of a script, with state that each rank, all ranks, or the elements of a parameter have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state or state.update(own_state(self, group, parameter))
                state["momentum"].lerp_(parameter.grad, 0.1)
                state["errors"] += 1
                state["factors"] += 1
                state["step"] += 1
                parameter.sub_(state["momentum"], alpha=group["lr"])


def own_state(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    zeros = torch.zeros_like(parameter)
    return {"momentum": zeros, "errors": zeros.clone(), "factors": zeros.new_zeros(3), "step": 0}


def with_own_optimizer(options: dict[str, Any]) -> dict[str, Any]:
    keywords = small(options)
    return {**keywords, "optimizer": OwnOptimizer(keywords["model_parameters"])}


def registered_optimizers_are_known() -> None:
    """One of the script's own is refused by its name, and taken once it is registered."""
    engine = engine_of(2, "bf16", model="tests.programs.deepspeed_state_cases:with_own_optimizer")
    with pytest.raises(ConfigError, match=r"register_optimizer\(OwnOptimizer, create"):
        EngineState(engine)
    (refused,) = refusals(engine)
    assert "OwnOptimizer is not known" in refused
    ways: Any = {"momentum": "elementwise", "errors": "local", "factors": "replicated"}
    megatron_ft.register_optimizer(OwnOptimizer, create=own_state, state=ways | {"step": "scalar"})
    assert refusals(engine) == []
    state = EngineState(engine)
    for _ in range(2):
        train_step(engine)
    objects, kept = state.objects(), host_copy(live_tensors(state))
    assert {numbers["step"] for numbers in objects["numbers"].values()} == {2}
    places = state.logical_map()
    assert len(places["optimizer/0/momentum"].pieces) > 0
    (whole,) = places["optimizer/0/factors"].pieces
    assert whole.global_shape == (3,) and whole.global_name == "optimizer/0/factors"
    assert "optimizer/0/errors" not in places
    with pytest.raises(LayoutMismatchError, match="optimizer/0/errors first"):
        state.expect_reshape()
    train_step(engine)
    for name, tensor in live_tensors(state).items():
        tensor.data.copy_(kept[name])
    state.load(objects)
    assert {numbers["step"] for numbers in state.objects()["numbers"].values()} == {2}
    engine.destroy()


def generators_come_last() -> None:
    """A part that draws while it loads does not move the generators."""
    engine = engine_of(1, "fp32")
    order: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {"name": self.name}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict == {"name": self.name}
            order.append(self.name)

    state = EngineState(engine, {name: Part(name) for name in (RANDOM, "loader", "client")})
    state.load(state.objects())
    assert order == ["loader", "client", RANDOM]
    distributed.destroy_process_group()
