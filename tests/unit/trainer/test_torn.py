"""No torn snapshot is sealed, whatever a program does between a boundary and its fence.

Copies are as late as they may be (tests/support/torn.py).  Each snapshot that is sealed is compared
with the state at its boundary; the others must be few, and name what changed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ft.arena import digest
from megatron_ft.core.shard import LayoutEntry
from megatron_ft.trainer.sample import Sampler
from megatron_ft.trainer.state import drawn
from tests.support.captures import WAIT, FakeSmp
from tests.support.fake_ranks import as_rank
from tests.support.torn import PIECE, Trial, parameter

Change = Callable[["Momentum"], object]


class Momentum(torch.nn.Module):
    """A student that the optimizer trains, and a larger teacher that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.student = parameter(2000)
        self.teacher = torch.nn.Parameter(torch.zeros(40, 2000), requires_grad=False)
        self.spare = torch.ones(40, 2000)


def counted(model: Momentum) -> None:
    with torch.no_grad():
        model.teacher.add_(1.0)


def by_foreach(model: Momentum) -> None:
    torch._foreach_add_([model.teacher.detach()], 1.0)


def by_data(model: Momentum) -> None:
    model.teacher.data.add_(1.0)


def by_numpy(model: Momentum) -> None:
    array = model.teacher.detach().numpy()
    array += 1.0


def by_pointer(model: Momentum) -> None:
    first = ctypes.c_uint8.from_address(model.teacher.data_ptr()).value
    ctypes.memset(model.teacher.data_ptr(), first + 1, model.teacher.nbytes)


def exchanged(model: Momentum) -> None:
    """Weights of an average are swapped in: other memory."""
    model.teacher.data, model.spare = model.spare, model.teacher.data


def exchanged_objects(model: Momentum) -> None:
    other = torch.nn.Parameter(model.teacher.detach() + 1.0, requires_grad=False)
    torch.utils.swap_tensors(model.teacher, other)


def set_elsewhere(model: Momentum) -> None:
    with torch.no_grad():
        model.teacher.set_(model.teacher.detach() + 1.0)


def replaced_values(model: Momentum) -> None:
    model.load_state_dict({**model.state_dict(), "teacher": model.teacher.detach() + 1.0})


COUNTED = [counted, by_foreach, exchanged, set_elsewhere, replaced_values]
UNCOUNTED = [by_data, by_numpy, by_pointer]


def momentum(smp: FakeSmp, first: int = 0, piece_bytes: int = PIECE) -> tuple[Trial, Momentum, Any]:
    model = Momentum()
    optimizer = torch.optim.AdamW([model.student])
    _step(model, optimizer)
    return (
        Trial(smp, {"model": model, "optimizer": optimizer}, first, piece_bytes),
        model,
        optimizer,
    )


def _step(model: Momentum, optimizer: Any) -> None:
    model.student.grad = torch.ones_like(model.student)
    optimizer.step()


@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("change", [*COUNTED, *UNCOUNTED])
def test_what_forward_changes_is_captured_at_the_boundary(
    smp: FakeSmp, change: Change, first: int
) -> None:
    """After it was seen once; a momentum encoder, an average that is swapped in."""
    trial, model, optimizer = momentum(smp, first)

    def iterate(_: int) -> None:
        change(model)
        _step(model, optimizer)

    ended = trial.train(iterate, 7)
    assert list(ended.given_up) == [1] and ended.sealed == [2, 3, 4, 5, 6, 7]
    named = "student and 1 more" if change is replaced_values else "teacher"
    assert f"model/{named} changed outside of a fence" in ended.given_up[1]
    # All else is copied while training continues, if it is known what changes.
    if not first:
        assert ended.waited == ([] if change in COUNTED else ended.sealed)


def test_parameters_whose_insides_are_exchanged_are_seen(smp: FakeSmp) -> None:
    """As torch.utils.swap_tensors does, which refuses a tensor that a view was made of."""
    trial, model, optimizer = momentum(smp, piece_bytes=1 << 20)

    def iterate(_: int) -> None:
        exchanged_objects(model)
        _step(model, optimizer)

    ended = trial.train(iterate, 5)
    assert list(ended.given_up) == [1] and ended.sealed == [2, 3, 4, 5]


def test_weights_that_are_swapped_in_and_out_again_are_not_captured(smp: FakeSmp) -> None:
    trial, model, optimizer = momentum(smp)

    def iterate(number: int) -> None:
        if number % 2 == 0:
            by_data(model)
            trial.finish()
            model.teacher.data.sub_(1.0)
        _step(model, optimizer)

    ended = trial.train(iterate, 6)
    assert list(ended.given_up) == [1] and "model/teacher" in ended.given_up[1]


def test_what_changes_behind_the_copy_costs_no_snapshot(
    smp: FakeSmp, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come before the end of the next copy, so it is captured at the boundary from then."""
    trial, model, optimizer = momentum(smp)

    def iterate(number: int) -> None:
        if number > 1:
            trial.finish()
        counted(model)
        _step(model, optimizer)

    assert not trial.train(iterate, 4).given_up
    assert caplog.text.count("model/teacher changed outside of a fence") == 1
    assert trial.early == {"model/teacher"}


def test_a_decay_before_the_step_is_seen(smp: FakeSmp) -> None:
    weights = [parameter() for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    _train(weights, optimizer)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights), "optimizer": optimizer})

    def iterate(_: int) -> None:
        with torch.no_grad():
            torch._foreach_mul_(weights, 0.9)
        _train(weights, optimizer)

    ended = trial.train(iterate, 5)
    assert list(ended.given_up) == [1] and ended.sealed == [2, 3, 4, 5]


def test_an_embedding_that_forward_normalizes_is_captured_at_the_boundary(smp: FakeSmp) -> None:
    table = torch.nn.Embedding(200, 64, max_norm=1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=5.0)
    trial = Trial(smp, {"table": table, "optimizer": optimizer})

    def iterate(_: int) -> None:
        table(torch.arange(200)).sum().backward()
        optimizer.step()

    ended = trial.train(iterate, 5)
    assert len(ended.given_up) == 1 and ended.sealed[-1] == 5 and trial.early == {"table/weight"}


def test_three_kinds_of_changes_cost_a_snapshot_each_and_more_cost_none(smp: FakeSmp) -> None:
    state = {f"w{number}": parameter() for number in range(8)}
    trial = Trial(smp, state)

    def iterate(number: int) -> None:
        with torch.no_grad():
            state[f"w{number % 8}"].add_(1.0)
        with trial.manager.fence():
            pass

    ended = trial.train(iterate, 10)
    assert len(ended.given_up) == 4 and ended.sealed[-5:] == [6, 7, 8, 9, 10]


def _train(weights: list[torch.nn.Parameter], optimizer: Any) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


class Foreign:
    """An optimizer that is none of torch's and takes no hooks."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": weights}]

    def step(self) -> None:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.add_(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "foreign"}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        assert content == self.state_dict()


class Blind(Foreign):
    """One in C++, of which torch counts no write."""

    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.data.add_(1.0)


@pytest.mark.parametrize("kind", [Foreign, Blind])
def test_after_a_step_without_a_fence_copies_wait_at_the_boundary(
    smp: FakeSmp, kind: type[Foreign], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the optimizer."""
    weights = [parameter() for _ in range(3)]
    optimizer = kind(weights)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights), "stepper": optimizer})
    caplog.set_level(logging.WARNING)
    ended = trial.train(lambda _: optimizer.step(), 6)
    assert list(ended.given_up) == [1] and ended.sealed == ended.waited == [2, 3, 4, 5, 6]
    message = f"no fence came before the step of 'stepper' ({kind.__name__}): save() waits for all"
    assert caplog.text.count(message) == 1


def test_a_fence_holds_for_one_boundary_alone(smp: FakeSmp) -> None:
    """One that came before once says nothing of the next iterations."""
    weights = parameter()
    trial = Trial(smp, {"weights": weights.data})

    def iterate(number: int) -> None:
        if number < 4:
            with trial.manager.fence():
                weights.data.add_(1.0)
        else:
            weights.data.add_(1.0)

    ended = trial.train(iterate, 7)
    assert list(ended.given_up) == [3] and ended.sealed == [1, 2, 4, 5, 6, 7]
    assert ended.waited == [4, 5, 6, 7]


def test_behind_an_iteration_without_a_fence_a_copy_waits(smp: FakeSmp) -> None:
    """Nothing is known of that iteration: no snapshot was copied in it."""
    weights = parameter()
    trial = Trial(smp, {"weights": weights.data})
    trial.save()
    with trial.manager.fence():
        weights.data.add_(1.0)
    trial.settle()
    trial.skip()
    weights.data.add_(1.0)
    trial.save()
    weights.data.add_(1.0)
    trial.settle()
    assert trial.ended.waited == [3], "the copy runs on behind an iteration without a fence"
    assert trial.ended.sealed == [1, 3]
    trial.manager.close()


@pytest.mark.parametrize("skipped", [2, 1000])
def test_iterations_without_a_step_cost_no_snapshot_and_no_time(
    smp: FakeSmp, skipped: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss scaler skips steps; ``save`` is called while gradients accumulate."""
    weights = [parameter() for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    _train(weights, optimizer)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights), "optimizer": optimizer})

    def iterate(number: int) -> None:
        if number % skipped == 1:
            _train(weights, optimizer)

    caplog.set_level(logging.WARNING)
    ended = trial.train(iterate, 8)
    assert not ended.given_up and not caplog.text
    assert not ended.waited


def test_an_optimizer_that_is_made_anew_is_fenced(smp: FakeSmp) -> None:
    """The case of a registered fence that stays with the old one."""
    weights = [parameter()]
    first = torch.optim.SGD(weights, lr=1.0)
    state = {"weights": weights[0].data, "step": 0}
    trial = Trial(smp, state)
    trial.manager.register_fence(first)
    made = [first]

    def iterate(number: int) -> None:
        if number % 3 == 0:
            made.append(torch.optim.SGD(weights, lr=1.0))
        _train(weights, made[-1])
        state["step"] = number

    ended = trial.train(iterate, 8)
    assert ended.sealed == [1, 2, 3, 4, 5, 6, 7, 8] and not ended.waited
    fresh = trial.restored({"weights": torch.zeros(20_000), "step": 0})
    assert fresh["step"] == 8 and fresh["weights"].unique().tolist() == [-8.0]


class Hooked(Foreign):
    """One that is none of torch's, and takes hooks; each of them says how often it was called."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights)
        self.hooks: list[Any] = []

    def register_step_pre_hook(self, hook: Any) -> Any:
        self.hooks.append(hook)
        return self

    def remove(self) -> None:
        self.hooks.clear()

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})
        super().step()


@pytest.mark.parametrize("registered", [False, True])
def test_whatever_takes_hooks_is_fenced_once(smp: FakeSmp, registered: bool) -> None:
    weights = [parameter()]
    state: dict[str, Any] = {"model": torch.nn.ParameterList(weights), "optimizer": Hooked(weights)}
    trial = Trial(smp, state)
    if registered:
        trial.manager.register_fence(state["optimizer"])

    def iterate(number: int) -> None:
        if number == 4:
            state["optimizer"] = Hooked(weights)
        if number != 4:
            state["optimizer"].step()
            assert number == 1 or len(state["optimizer"].hooks) == 1

    assert not trial.train(iterate, 7).given_up


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: has none of the attributes of torch's optimizers, and hands on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("registered", ["not", "inner", "wrapper"])
def test_a_step_has_one_fence_however_it_was_registered(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch, registered: str
) -> None:
    weights = [parameter()]
    inner = torch.optim.SGD(weights, lr=1.0)
    optimizer = Wrapper(inner)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights)})
    if registered != "not":
        trial.manager.register_fence(inner if registered == "inner" else optimizer)
    fences: list[int] = []
    fence = trial.manager._captures.fence
    monkeypatch.setattr(trial.manager._captures, "fence", lambda: (fences.append(1), fence()))
    _train(weights, optimizer)
    assert fences == [1]
    trial.manager.close()
    _train(weights, optimizer)
    assert fences == [1], "a manager that is closed holds training"


@pytest.mark.all_layouts
def test_a_compiled_step_is_fenced(smp: FakeSmp) -> None:
    weights = [parameter()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights)})
    step = torch.compile(optimizer.step, backend="eager")

    def iterate(_: int) -> None:
        weights[0].grad = torch.ones_like(weights[0])
        step()

    assert trial.train(iterate, 4).sealed == [1, 2, 3, 4]


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
}
FORMS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


def _made(name: str, form: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Any]:
    weights = [torch.nn.Parameter(torch.ones(80, 120)) for _ in range(2)]
    if name == "SparseAdam":
        pytest.skip("takes sparse gradients alone, and steps as Adam does")
    if name == "LBFGS":  # a history that is soon complete: one that grows is a new layout
        form = {"history_size": 1, "max_iter": 2, **form}
    try:
        return weights, OPTIMIZERS[name](weights, lr=0.01, **form)
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"torch: {error}")


def _close(weights: list[torch.nn.Parameter], optimizer: Any, step: Callable[..., Any]) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.stack([(weight - 0.5).square().mean() for weight in weights]).sum()
        value.backward()
        return value

    loss()
    step(loss)


@pytest.mark.parametrize("form", FORMS, ids=["default", "foreach", "fused"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_of_torch_is_fenced_and_seen(
    smp: FakeSmp, name: str, form: dict[str, Any]
) -> None:
    """Seen also where its step passes no hook."""
    weights, optimizer = _made(name, form)
    for _ in range(3):
        _close(weights, optimizer, optimizer.step)
    trial = Trial(smp, {"model": torch.nn.ParameterList(weights), "optimizer": optimizer})
    bare = type(optimizer).step.__wrapped__

    def iterate(number: int) -> None:
        if number < 4:
            _close(weights, optimizer, optimizer.step)
        else:
            _close(weights, optimizer, lambda loss: bare(optimizer, loss))

    ended = trial.train(iterate, 6)
    assert ended.sealed == [1, 2, 4, 5, 6] and list(ended.given_up) == [3]


@pytest.mark.parametrize("looks", ["fence", "report"])
def test_a_write_that_is_counted_when_the_copy_has_ended_is_seen(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    """torch counts an operation when it is over, and it may end behind the copy."""
    sealing, counted = Event(), Event()
    seal = digest.seal

    def slow(*words: Any, **more: Any) -> Any:
        sealing.set()
        assert counted.wait(WAIT), "nothing was counted"
        return seal(*words, **more)

    monkeypatch.setattr(digest, "seal", slow)
    trial, model, _ = momentum(smp)
    trial.save()
    trial.copier.go.set()
    assert sealing.wait(WAIT), "nothing was copied"
    torch.autograd.graph.increment_version(model.teacher)
    if looks == "fence":
        with trial.manager.fence():
            pass
    counted.set()
    trial.settle()
    assert list(trial.ended.given_up) == [1] and "model/teacher" in trial.ended.given_up[1]
    trial.manager.close()


def test_a_step_behind_the_fence_is_none_of_a_snapshot_that_is_not_yet_sealed(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, seal = Event(), digest.seal

    def slow(*words: Any, **more: Any) -> Any:
        assert stepped.wait(WAIT), "nothing has stepped"
        return seal(*words, **more)

    monkeypatch.setattr(digest, "seal", slow)
    trial, model, optimizer = momentum(smp)
    trial.save()
    _step(model, optimizer)
    stepped.set()
    trial.settle()
    assert trial.ended.sealed == [1]
    trial.manager.close()


def test_tensors_of_inference_mode_have_no_counter_and_are_sampled(smp: FakeSmp) -> None:
    with torch.inference_mode():
        cache = torch.zeros(60_000)
    weights = parameter()
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trial = Trial(smp, {"cache": cache, "weights": weights})

    def iterate(number: int) -> None:
        if number == 4:
            with torch.inference_mode():
                cache.add_(1.0)
        _train([weights], optimizer)

    ended = trial.train(iterate, 6)
    assert list(ended.given_up) == [3] and "cache changed" in ended.given_up[3]


def test_a_sample_draws_nothing_from_the_generators_of_training(smp: FakeSmp) -> None:
    before = drawn()
    trial, model, optimizer = momentum(smp)
    assert len(trial.train(lambda _: _step(model, optimizer), 3).sealed) == 3
    assert drawn() == before


def test_a_sample_sees_the_part_of_a_tensor_that_is_stored() -> None:
    """Any byte of any tensor has its turn; a replicated tensor is stored in part."""
    whole = torch.arange(3000, dtype=torch.int32)
    start, stop = 1000, 2000
    entry = LayoutEntry("w", "int32", (3000,), 64, 4000, start, stop, False, "", 3, None)
    small = LayoutEntry("s", "uint8", (7,), 4096, 7, 0, 7, False, "", 1, None)
    live = {"w": whole, "s": torch.arange(7, dtype=torch.uint8)}
    region = np.zeros(8192, np.uint8)
    region[64:4064] = whole[start:stop].numpy().view(np.uint8)
    region[4096:4103] = np.arange(7)
    sampler, seen = Sampler([entry, small]), set[tuple[str, int]]()
    for _ in range(40):
        (sample,) = sampler.samples(live)
        sample.item.target.copy_(sample.item.source)
        assert not sample.miscaptured(region) and sample.is_live()
        seen |= {(piece.entry.name, byte) for piece in sample.pieces for byte in _range(piece)}
        sampler.draw(live)
    assert seen == {("s", byte) for byte in range(7)} | {("w", byte) for byte in range(4000)}
    region[64 + 4 * 321] ^= 1
    assert any(_differs(sampler, live, region) for _ in range(200))


def _range(piece: Any) -> range:
    return range(piece.start, piece.stop)


def _differs(sampler: Sampler, live: dict[str, torch.Tensor], region: Any) -> bool:
    sampler.draw(live)
    (sample,) = sampler.samples(live)
    sample.item.target.copy_(sample.item.source)
    return sample.miscaptured(region) == ["w"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_sample_is_of_the_memory_that_a_tensor_has_at_its_boundary(moved: bool) -> None:
    """Though it was drawn before."""
    entry = LayoutEntry("w", "float32", (100,), 0, 400, 0, 100, False, "", 1, None)
    live = {"w": torch.zeros(100)}
    sampler = Sampler([entry])
    sampler.draw(live)
    if moved:
        live["w"].data = torch.ones(100)
    else:
        live["w"].fill_(1.0)
    (sample,) = sampler.samples(live)
    assert (sample.item.source.view(torch.float32) == 1.0).all()
    live["w"].untyped_storage().resize_(0)
    assert sampler.samples(live) == []


def outside(weight: Any) -> None:
    weight.add_(1.0)


def inside(weight: Any) -> None:
    weight.to_local().add_(1.0)


def by_foreach_of_dtensors(weight: Any) -> None:
    """Neither counter counts it."""
    torch._foreach_add_([weight], 1.0)


@pytest.mark.parametrize("change", [outside, inside, by_foreach_of_dtensors])
def test_a_dtensor_is_seen_to_change_outside_and_inside(
    smp: FakeSmp, change: Callable[[Any], None]
) -> None:
    """As FSDP2's parameters: a write is counted on one of the two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.zeros(80_000), mesh, [Shard(0)])
        weight = torch.nn.Parameter(whole)
        optimizer = torch.optim.SGD([parameter(2000)])
        trial = Trial(smp, {"model": torch.nn.ParameterList([weight]), "small": parameter(2000)})

        def iterate(number: int) -> None:
            if number % 3 == 2:
                with torch.no_grad():
                    change(weight)
            optimizer.step()

        ended = trial.train(iterate, 8)
    assert list(ended.given_up) == [1] and "model/0 changed" in ended.given_up[1]
    assert ended.sealed == [2, 3, 4, 5, 6, 7, 8]
