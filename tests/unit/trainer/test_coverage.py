"""What trains is captured and filled, whatever state_dict gives: copies, other names, or less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer import coverage, mapping
from megatron_ft.trainer.module_state import ModuleState
from tests.support.captures import FakeSmp, bits, make_manager, saved

State = dict[str, Any]


@pytest.fixture
def smp(tmp_path: Path) -> Iterator[FakeSmp]:
    made = FakeSmp(tmp_path)
    yield made
    if made.arena is not None:
        made.arena.close()


class Counting(nn.Module):
    """A layer with a buffer that no state dict has, and one that every has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(2))


class WithoutArguments(Counting):
    """state_dict() as many scripts write it."""

    def state_dict(self) -> State:  # type: ignore[override]
        return {"all": torch.cat([one.detach().flatten() for one in self.parameters()])}

    def load_state_dict(self, content: State) -> None:  # type: ignore[override]
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(content["all"][: one.numel()].view(one.shape))


class Rounding(Counting):
    """Saves in half the bits, under other names, and writes that back when it loads."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.named_buffers():
            destination[f"{prefix}{name}_rounded"] = tensor.bfloat16()

    def _load_from_state_dict(self, content: Any, prefix: str, *others: Any) -> None:
        for name, tensor in self.named_buffers():
            tensor.copy_(content[f"{prefix}{name}_rounded"])


class Averaging(Counting):
    """An average in a plain attribute, which its own methods save and load."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(5000)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "average": self.average.clone()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        rest = dict(state_dict)
        self.average = rest.pop("average").clone()
        return super().load_state_dict(rest, strict, assign)


class Assigning(Averaging):
    """Loads by putting other parameters in the place of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        copies = {name: tensor.detach().clone() for name, tensor in state_dict.items()}
        return super().load_state_dict(copies, assign=True)


class Keeping(Counting):
    """Extra state of a kind that the class names."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.kept, self._make = 0, make

    def get_extra_state(self) -> Any:
        return self._make(self.kept)

    def set_extra_state(self, state: Any) -> None:
        self.kept = len(state)


def hooked(change: Callable[[State], State]) -> Any:
    """A model whose state dict is changed by a hook."""

    def hook(module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        changed = change(dict(found))
        found.clear()
        found.update(changed)

    model: Any = nn.Sequential(Counting(), nn.BatchNorm1d(6), Counting())
    model.register_state_dict_post_hook(hook)
    return model


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda found: {name: change(tensor.detach()) for name, tensor in found.items()}


def tied() -> Any:
    model: Any = nn.Sequential(Counting(), Counting())
    model[1].linear.weight = model[0].linear.weight
    model.append(model[0])
    return model


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), Counting())
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def hidden() -> nn.Module:
    model = nn.Sequential(Counting(), nn.Linear(6, 6))
    vars(model)["named_parameters"] = lambda *_, **__: iter([])
    return model


def patched() -> nn.Module:
    model = nn.Sequential(Counting())
    vars(model)["state_dict"] = lambda *_, **__: {}
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "cloned": lambda: hooked(each(torch.clone)),
    "cast": lambda: hooked(each(torch.Tensor.bfloat16)),
    "in another shape": lambda: hooked(each(torch.flatten)),
    "renamed": lambda: hooked(lambda found: {f"my.{k}": v for k, v in found.items()}),
    "renamed and cloned": lambda: hooked(
        lambda found: {f"my.{name}": tensor.detach().clone() for name, tensor in found.items()}
    ),
    "filtered": lambda: hooked(lambda found: {k: v for k, v in found.items() if "bias" in k}),
    "with a note": lambda: hooked(lambda found: {**found, "note": {"text": 1}}),
    "without arguments": WithoutArguments,
    "rounding": lambda: nn.Sequential(Rounding(), Rounding()),
    "averaging": Averaging,
    "assigning": Assigning,
    "keeping tensors": lambda: nn.Sequential(Keeping(lambda kept: torch.ones(kept))),
    "keeping bytes": lambda: Keeping(bytes),
    "tied": tied,
    "parametrized": parametrized,
    "hidden": hidden,
    "patched": patched,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "scripted inside": lambda: nn.Sequential(Counting(), torch.jit.script(nn.BatchNorm1d(6))),
    "compiled": lambda: torch.compile(nn.Sequential(Counting())),
    "frozen": lambda: nn.Sequential(Counting(), nn.Linear(6, 6)).requires_grad_(False),
}


def made(model: nn.Module) -> State:
    parameters = [p for module in model.modules() for p in module._parameters.values()]
    unique = {id(parameter): parameter for parameter in parameters if parameter is not None}
    optimizer = torch.optim.AdamW(unique.values())
    return {"model": model, "optimizer": optimizer}


def held(model: nn.Module) -> list[torch.Tensor]:
    """All that a module and those in it have, attributes included."""
    return [
        tensor
        for module in model.modules()
        for holder in (module._parameters, module._buffers, vars(module))
        for tensor in holder.values()
        if isinstance(tensor, torch.Tensor)
    ]


def trained(state: State, steps: int = 3) -> State:
    """Everything has changed, moments and what a state dict does not have among it."""
    optimizer = state["optimizer"]
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    with torch.no_grad():
        for tensor in held(state["model"]):
            if not isinstance(tensor, nn.Parameter):
                tensor.add_(1.0009765625 if tensor.is_floating_point() else 1)
    for module in state["model"].modules():
        if isinstance(module, Keeping):
            module.kept += steps
    return state


def look(state: State) -> list[Any]:
    kept = [getattr(module, "kept", None) for module in state["model"].modules()]
    moments = [bits(m) for per in state["optimizer"].state.values() for m in per.values()]
    return [*map(bits, held(state["model"])), *kept, *moments]


def restored(smp: FakeSmp, make: Callable[[], State]) -> tuple[State, State]:
    state = trained(make())
    saved(smp, state)
    fresh = make()
    assert make_manager(smp).load(into=fresh) == 1
    return state, fresh


@pytest.mark.parametrize("name", MODELS)
def test_a_module_comes_back_whatever_its_state_dict_gives(smp: FakeSmp, name: str) -> None:
    torch.manual_seed(5)
    state, fresh = restored(smp, lambda: made(MODELS[name]()))
    assert look(fresh) == look(state)
    params = {id(p) for module in fresh["model"].modules() for p in module._parameters.values()}
    groups = fresh["optimizer"].param_groups
    assert {id(p) for group in groups for p in group["params"]} <= params


class Numbering(torch.optim.AdamW):
    """Its state goes by names of its own, and is the state itself."""

    def state_dict(self) -> State:
        content = super().state_dict()
        return {"named": {f"p{n}": kept for n, kept in content["state"].items()}, "rest": content}

    def load_state_dict(self, content: State) -> None:
        super().load_state_dict(content["rest"])


class Cloning(torch.optim.AdamW):
    """Gives copies of its state."""

    def state_dict(self) -> State:
        content = super().state_dict()
        cloned = {n: {k: t.clone() for k, t in s.items()} for n, s in content["state"].items()}
        return {**content, "state": cloned}


class Packing(Cloning):
    """Gives copies in a form of its own, and nothing back of the moments."""

    def state_dict(self) -> State:
        content = super().state_dict()
        return {"packed": [*content["state"].values()], "groups": content["param_groups"]}

    def load_state_dict(self, content: State) -> None:
        """Some keep moments out of what they load."""


def with_hook(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)

        def hook(_: Any, content: State) -> State:
            kept = content["state"].items()
            return {**content, "state": {n: {k: change(t) for k, t in s.items()} for n, s in kept}}

        optimizer.register_state_dict_post_hook(hook)
        return optimizer

    return make


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "cloned by a hook": with_hook(torch.clone),
    "flattened by a hook": with_hook(torch.flatten),
    "numbering": Numbering,
    "cloning": Cloning,
}


def small(make: Callable[..., torch.optim.Optimizer]) -> State:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return {"model": model, "optimizer": make(model.parameters())}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_comes_back_whatever_its_state_dict_gives(smp: FakeSmp, name: str) -> None:
    state, fresh = restored(smp, lambda: small(OPTIMIZERS[name]))
    assert look(fresh) == look(state)
    again = trained(fresh)
    assert len(look(again)) == len(look(state))


def test_an_optimizer_that_hides_its_state_is_refused_by_the_name_of_a_tensor(smp: FakeSmp) -> None:
    with pytest.raises(ConfigError, match="optimizer/state/0/step first: put the module"):
        make_manager(smp).prepare(trained(small(Packing)))


def with_masters() -> State:
    """An optimizer of copies that the mapping does not have."""
    state = small(torch.optim.AdamW)
    masters = [one.detach().clone().requires_grad_() for one in state["model"].parameters()]
    return {**state, "optimizer": torch.optim.AdamW(masters)}


def test_without_the_check_by_address_it_would_train_on_other_masters(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "require_covered", lambda *_: None)
    state, fresh = restored(smp, with_masters)
    masters = [s["optimizer"].param_groups[0]["params"] for s in (state, fresh)]
    assert look(fresh) == look(state) and [*map(bits, masters[0])] != [*map(bits, masters[1])]


@pytest.mark.parametrize("name", ["rounding", "assigning"])
def test_without_the_second_fill_a_load_would_have_written_over_the_first(
    smp: FakeSmp, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Versions and addresses tell what it has written to."""
    monkeypatch.setattr(coverage.Written, "lost", lambda *_: set())
    monkeypatch.setattr(mapping, "require_covered", lambda *_: None)
    state, fresh = restored(smp, lambda: made(ROUGH[name]()))
    assert look(fresh) != look(state)


class WritingOver(Averaging):
    """Its load changes what it is given."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        halved = {name: tensor.detach() / 2 for name, tensor in state_dict.items()}
        return super().load_state_dict(halved, strict, assign)


ROUGH: dict[str, Callable[[], nn.Module]] = {
    "rounding": lambda: nn.Sequential(Rounding()),
    "assigning": WritingOver,
}


class Outside:
    """An object that loads weights of a model that the mapping has, too."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rounds = model, 0

    def state_dict(self) -> State:
        return {"rounded": {n: t.half() for n, t in self.model.state_dict().items()}}

    def load_state_dict(self, content: State) -> None:
        self.model.load_state_dict(content["rounded"])


def test_what_another_object_loads_does_not_change_what_was_filled(smp: FakeSmp) -> None:
    def make() -> State:
        state = small(torch.optim.AdamW)
        return {**state, "outside": Outside(state["model"])}

    state, fresh = restored(smp, make)
    assert look(fresh) == look(state)


def test_an_optimizer_of_weights_that_nobody_captures_is_refused_at_the_load(smp: FakeSmp) -> None:
    """Masters, or a model that the mapping does not have."""
    state = with_masters()
    masters = state["optimizer"].param_groups[0]["params"]
    with pytest.raises(ConfigError, match="4 tensors .* optimizer/param_groups/0/params/0 first"):
        make_manager(smp).load(into=state)
    assert make_manager(smp).load(into={**state, "masters": masters}) == 0
    allowed = make_manager(smp, leave_out=["optimizer/param_groups/*"])
    assert allowed.load(into=state) == 0


def test_what_is_left_out_is_neither_captured_nor_filled(smp: FakeSmp) -> None:
    state = small(torch.optim.AdamW)
    patterns = ["model/1.running_*", "model/0.bias"]
    manager = make_manager(smp, leave_out=patterns)
    manager.prepare(state)
    smp.grant(1)
    manager.save(1, state)
    smp.wait_ended()
    manager.close()
    smp.offer_last()
    fresh = small(torch.optim.AdamW)
    before = bits(fresh["model"][0].bias)
    assert make_manager(smp, leave_out=patterns).load(into=fresh) == 1
    assert bits(fresh["model"][0].weight) == bits(state["model"][0].weight)
    assert bits(fresh["model"][0].bias) == before != bits(state["model"][0].bias)


def test_frozen_parameters_stay_frozen_and_others_do_not(smp: FakeSmp) -> None:
    """A script that unfreezes at some step has passed it."""
    state = small(torch.optim.AdamW)
    state["model"][1].weight.requires_grad_(False)
    saved(smp, state)
    fresh = small(torch.optim.AdamW)
    fresh["model"][0].requires_grad_(False)
    make_manager(smp).load(into=fresh)
    flags = [one.requires_grad for one in fresh["model"].parameters()]
    assert flags == [True, True, False, True]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "counting": Counting,
    "rounding": Rounding,
    "keeping": lambda: Keeping(lambda kept: [kept] * kept),
    "norm": lambda: nn.BatchNorm1d(6),
    "linear": lambda: nn.Linear(6, 6, bias=False),
}
CHANGES: dict[str, Callable[[State], State]] = {
    "none": dict,
    "clone": lambda f: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in f.items()},
    "drop": lambda f: dict(list(f.items())[::2]),
    "rename": lambda f: {f"x{k}": v for k, v in f.items()},
    "detach": lambda f: {k: getattr(v, "data", v) for k, v in f.items()},
}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=2),
    tie=st.booleans(),
)
def test_generated_modules_are_enumerated_whole(
    layers: list[str], changes: list[str], tie: bool
) -> None:
    """All tensors are the module's own, under the names that a state_dict without hooks has."""
    model: Any = nn.Sequential(*(LAYERS[layer]() for layer in layers))
    if tie:
        model.append(model[0])

    def hook(change: Callable[[State], State]) -> Callable[..., None]:
        def changed(module: nn.Module, found: State, *_: Any) -> None:
            now = change(dict(found))
            found.clear()
            found.update(now)

        return changed

    for number, change in enumerate(changes):
        model[number % len(model)].register_state_dict_post_hook(hook(CHANGES[change]))
    entry = ModuleState("model", model)
    entry.refresh()
    own = [*model.parameters(), *model.buffers()]
    found = {**entry.parameters, **entry.buffers}
    assert {id(tensor) for tensor in own} == {id(tensor) for tensor in found.values()}
    plain = {f"model/{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    assert plain == entry.parameters.keys()
