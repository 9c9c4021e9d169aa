"""What ranks of tests of changed engines run: each change is captured as it is, or refused.

An engine's tensors are remembered between snapshots.  What is stored after a change is compared
with what a state that remembers nothing finds.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import distributed, nn

from deepspeed_ext.state import EngineState
from megatron_ft.trainer.binding import live_part
from megatron_ft.trainer.state import live_tensors
from tests.programs.deepspeed_models import WIDTH
from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.captures import WAIT, FakeSmp, bits, make_manager
from tests.support.deepspeed_cells import Cell, zero

PRECISION = {0: "fp32", 1: "bf16", 2: "bf16", 3: "bf16"}

Change = Callable[[Any], None]


class Snapshots:
    """An engine's snapshots; two were taken, so that what can be remembered is."""

    def __init__(self, engine: Any) -> None:
        self.smp = FakeSmp(Path(sys.argv[1], str(distributed.get_rank())))
        self.smp.directory.mkdir(parents=True)
        self.manager = make_manager(self.smp)
        self.state, self.taken, self._of = EngineState(engine), 0, engine
        for inner in [self.state.inner_optimizer]:
            self.manager.register_fence(inner)
        train_step(engine)
        self.manager.prepare(self.state)
        for _ in range(2):
            assert self.problem() == ""

    def problem(self, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Why there is no snapshot of now; ``meanwhile`` runs before its copy begins."""
        self.taken += 1
        snapshot, held = self.smp.grant(self.taken, slot=0), Event()
        if self.taken > 1 and not self._engine.binding.hurries:
            self._engine._thread.submit(lambda: assert_soon(held))
        self.manager.save(self.taken, self.state)
        meanwhile()
        held.set()
        self.smp.wait_ended()
        return self.smp.abandoned_ids.get(snapshot, "")

    @property
    def _engine(self) -> Any:
        return self.manager._captures._arena.engine

    def wrong(self) -> list[str]:
        """What the last one does not hold as a state that has just been made finds it."""
        binding, found = self._engine.binding, live_tensors(EngineState(self._of))
        entries = [entry for entry in binding.layout.entries if not entry.alias_of]
        kept = binding._targets[0]
        return [e.name for e in entries if bits(kept[e.name]) != bits(live_part(found[e.name], e))]

    def names(self) -> set[str]:
        return {entry.name for entry in self._engine.binding.layout.entries}

    def close(self) -> None:
        self.manager.close()
        self._of.destroy()
        distributed.destroy_process_group()


def assert_soon(event: Event) -> None:
    assert event.wait(WAIT), "the test does not let the copy begin"


def engine_of(stage: int) -> Any:
    cell = Cell(
        "case", 0, zero(stage, PRECISION[stage]), model="tests.programs.deepspeed_models:small"
    )
    return make_engine(dataclasses.asdict(cell))


def state_of(engine: Any) -> dict[str, Any]:
    inner = EngineState(engine).inner_optimizer
    return next(iter(inner.state.values()))


def spoilt(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; the tensor itself, which nobody uses any more, is made another one."""
    copy = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(77)
    return copy


def moved(tensor: torch.Tensor) -> None:
    """Give it other memory with the same values, and spoil the old one."""
    tensor.data = spoilt(tensor.data.view_as(tensor))


def buffer_is_replaced(engine: Any) -> None:
    engine.module.mean = torch.rand_like(engine.module.mean)


def buffer_moves(engine: Any) -> None:
    moved(engine.module.mean)


def frozen_is_replaced(engine: Any) -> None:
    """Without ZeRO-3; its values stay, since a script that changes them is refused."""
    engine.module.places.weight = nn.Parameter(spoilt(engine.module.places.weight), False)


def frozen_module_is_replaced(engine: Any) -> None:
    fresh = nn.Embedding.from_pretrained(spoilt(engine.module.places.weight), freeze=True)
    engine.module.places = fresh


def frozen_is_to_be_trained(engine: Any) -> None:
    """By nobody: the optimizer was not given it."""
    engine.module.places.weight.requires_grad = True


def frozen_moves(engine: Any) -> None:
    """Under ZeRO-3 its partition does."""
    weight = engine.module.places.weight
    moved(getattr(weight, "ds_tensor", weight))


def partition_is_replaced(engine: Any) -> None:
    """Under ZeRO-3: an attribute of a parameter that stays."""
    weight = engine.module.places.weight
    fresh = spoilt(weight.ds_tensor)
    vars(fresh).update(vars(weight.ds_tensor))
    weight.ds_tensor = fresh


def step_is_replaced_by_its_equal(engine: Any) -> None:
    state = state_of(engine)
    state["step"] = state["step"].clone()


def moment_is_replaced(engine: Any) -> None:
    state = state_of(engine)
    state["exp_avg"] = spoilt(state["exp_avg"])


def moment_moves(engine: Any) -> None:
    moved(state_of(engine)["exp_avg_sq"])


def states_are_loaded(engine: Any) -> None:
    """As load_state_dict of torch's optimizers does: every tensor is another one."""
    inner = EngineState(engine).inner_optimizer
    for state in inner.state.values():
        state.update({name: spoilt(tensor) for name, tensor in state.items()})


def master_moves(engine: Any) -> None:
    inner = EngineState(engine).inner_optimizer
    moved(next(iter(inner.state)))


def trained_is_frozen(engine: Any) -> None:
    """Its moments stay: it may be trained again."""
    bias = engine.module.up.bias
    bias.requires_grad = not bias.requires_grad


ANYWHERE = (
    buffer_is_replaced,
    buffer_moves,
    frozen_is_to_be_trained,
    frozen_moves,
    step_is_replaced_by_its_equal,
    moment_is_replaced,
    moment_moves,
    states_are_loaded,
    master_moves,
    trained_is_frozen,
    trained_is_frozen,
)
FOLLOWED: dict[int, tuple[Change, ...]] = {
    0: (*ANYWHERE, frozen_is_replaced, frozen_module_is_replaced),
    2: (*ANYWHERE, frozen_is_replaced, frozen_module_is_replaced),
    3: (*ANYWHERE, partition_is_replaced),
}


def changes_are_followed() -> None:
    """Before a snapshot, and what is trained on behind it is captured by the next one."""
    stage = int(sys.argv[2])
    engine = engine_of(stage)
    snapshots = Snapshots(engine)
    for change in FOLLOWED[stage]:
        change(engine)
        for _ in range(2):
            assert snapshots.problem() == "", change.__name__
            assert snapshots.wrong() == [], change.__name__
            train_step(engine)
    snapshots.close()


def memory_that_moves_before_the_copy_costs_one_snapshot() -> None:
    """As where a framework gives tensors other memory behind the boundary: from then on they are
    captured at it."""
    engine = engine_of(int(sys.argv[2]))
    snapshots = Snapshots(engine)
    problem = snapshots.problem(lambda: master_moves(engine))
    assert "changed outside of a fence" in problem, problem
    for _ in range(2):
        assert snapshots.problem(lambda: master_moves(engine)) == ""
        assert snapshots.wrong() == []
    snapshots.close()


def parameter_comes(engine: Any) -> Callable[[], None]:
    engine.module.norm.extra = nn.Parameter(torch.ones(3))
    return lambda: delattr(engine.module.norm, "extra")


def buffer_comes(engine: Any) -> Callable[[], None]:
    engine.module.norm.register_buffer("extra", torch.ones(3))
    return lambda: delattr(engine.module.norm, "extra")


def module_comes(engine: Any) -> Callable[[], None]:
    engine.module.extra = nn.BatchNorm1d(3)
    return lambda: delattr(engine.module, "extra")


def buffer_goes(engine: Any) -> Callable[[], None]:
    kept = engine.module._buffers.pop("mean")

    def back() -> None:
        # Names come in their order.
        later = engine.module._buffers.pop("seen")
        engine.module._buffers.update(mean=kept, seen=later)

    return back


def frozen_goes(engine: Any) -> Callable[[], None]:
    kept = engine.module.places.weight
    engine.module.places.weight = None

    def back() -> None:
        engine.module.places.weight = kept

    return back


def trained_is_replaced(engine: Any) -> Callable[[], None]:
    """The optimizer continues with the old one, so that nobody trains this one."""
    kept = engine.module.up.bias
    engine.module.up.bias = nn.Parameter(torch.zeros(3 * WIDTH))

    def back() -> None:
        engine.module.up.bias = kept

    return back


def optimizer_gets_more(engine: Any) -> Callable[[], None]:
    """Without ZeRO, of outside of the model: it has no name in a snapshot."""
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return lambda: engine.optimizer.param_groups.pop()


def moment_comes(engine: Any) -> Callable[[], None]:
    state = state_of(engine)
    state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    return lambda: state.pop("max_exp_avg_sq")


def moment_goes(engine: Any) -> Callable[[], None]:
    state = state_of(engine)
    kept = state.pop("exp_avg")

    def back() -> None:
        later = dict(state)
        state.clear()
        state.update(step=later.pop("step"), exp_avg=kept, **later)

    return back


def moment_takes_another_form(engine: Any) -> Callable[[], None]:
    state = state_of(engine)
    kept, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    return lambda: state.update(exp_avg=kept)


ELSEWHERE = (
    parameter_comes,
    buffer_comes,
    module_comes,
    buffer_goes,
    frozen_goes,
    moment_comes,
    moment_goes,
    moment_takes_another_form,
)
FRESH: dict[int, tuple[Callable[[Any], Callable[[], Any]], ...]] = {
    0: ELSEWHERE,
    2: (*ELSEWHERE, trained_is_replaced),
    3: (buffer_comes, buffer_goes, moment_comes, moment_goes, moment_takes_another_form),
}
REFUSED = (trained_is_replaced, optimizer_gets_more)
"""Without ZeRO."""

REFUSALS = "a parameter of shape .* that is not in the model"
LATE: dict[Any, int] = {moment_takes_another_form: 1}
"""Snapshots without success: the form of what no boundary captures is compared as it is copied."""


def other_layouts_are_planned_anew() -> None:
    """Snapshots continue, with what a state that has just been made finds, there and back."""
    stage = int(sys.argv[2])
    engine = engine_of(stage)
    snapshots = Snapshots(engine)
    for change in FRESH[stage]:
        before = snapshots.names()
        back = change(engine)
        problems = [snapshots.problem() for _ in range(LATE.get(change, 0) + 2)]
        assert problems[-2:] == ["", ""], (change.__name__, problems)
        assert snapshots.names() == {*live_tensors(EngineState(engine))}, change.__name__
        assert snapshots.wrong() == [], change.__name__
        assert change in LATE or snapshots.names() != before, change.__name__
        back()
        problems = [snapshots.problem() for _ in range(LATE.get(change, 0) + 1)]
        assert problems[-1] == "", (change.__name__, problems)
        assert snapshots.names() == before, change.__name__
        assert snapshots.wrong() == [], change.__name__
    snapshots.close()


def other_layouts_are_refused() -> None:
    """As long as they last; never sealed with what was there before."""
    engine = engine_of(int(sys.argv[2]))
    snapshots = Snapshots(engine)
    for change in REFUSED:
        back = change(engine)
        for _ in range(2):
            assert re.search(REFUSALS, snapshots.problem()), change.__name__
        back()
        assert snapshots.problem() == "", change.__name__
        assert snapshots.wrong() == [], change.__name__
    snapshots.close()
