"""A mapping that is asked again and again answers as one that was never asked before."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.objects import Part, decode, encode
from megatron_ft.trainer.mapping import Enumeration, MappingState, enumerate_entry
from megatron_ft.trainer.state import RngState
from tests.support.calls import calls_of_save

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))

State = dict[str, Any]
Edit = Callable[[State, int], object]


class WithExtra(torch.nn.Linear):
    """Keeps more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


class Renaming(torch.nn.Linear):
    """Stores its tensors in a way of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}own"] = self.weight if keep_vars else self.weight.detach()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.second = torch.nn.Linear(4, 3, bias=False)
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.mask


NOTES: list[Callable[[], Any]] = [lambda: None, lambda: 3, lambda: {"tensor": torch.ones(2)}]
"""What an optimizer may keep beside tensors, for each parameter."""


def training(variant: int = 0) -> State:
    """One whose optimizer keeps tensors alone, something else as well, or what is in the mapping
    under another name."""
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    )
    step({"model": model, "optimizer": optimizer}, 0)
    if 0 < variant <= len(NOTES):
        for holder in optimizer.state.values():
            holder["note"] = NOTES[variant - 1]()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "plain": torch.ones(9000),
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "rng": RngState(),
        "last": torch.ones(2),
        "shared": [*optimizer.state.values()][3] if variant > len(NOTES) else 7,
    }


def step(state: State, _: int) -> None:
    for group in state["optimizer"].param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def pick(items: Any, number: int) -> Any:
    items = list(items)
    return items[number % len(items)]


def owner(state: State, number: int, kind: str = "_parameters") -> tuple[dict[str, Any], str]:
    """A module's holder with anything in it, and a name in it."""
    holders = [vars(m)[kind] for m in state["model"].modules()]
    holder = pick([h for h in holders if h] or [{"none": None}], number)
    return holder, pick(holder, number)


def linear(state: State, number: int) -> Any:
    found = [m for m in state["model"].modules() if isinstance(m, torch.nn.Linear)]
    return pick(found or [torch.nn.Linear(1, 1)], number)


def some(state: State, number: int) -> Any:
    return pick(state["model"].modules(), number)


def kept(state: State, number: int) -> dict[Any, Any]:
    return pick([*state["optimizer"].state.values()] or [{}], number)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def replace_parameter(state: State, number: int) -> None:
    holder, name = owner(state, number)
    holder[name] = parameter()


def remove_parameter(state: State, number: int) -> None:
    holder, name = owner(state, number)
    holder[name] = None


def delete_parameter(state: State, number: int) -> None:
    holder, name = owner(state, number)
    del holder[name]


def add_parameter(state: State, number: int) -> None:
    some(state, number).register_parameter(f"extra{number % 3}", parameter())


def tie(state: State, number: int) -> None:
    holder, name = owner(state, number)
    other, its = owner(state, number // 7)
    holder[name] = other[its]


def move(state: State, number: int) -> None:
    """The same tensor under another name."""
    holder, name = owner(state, number)
    holder[f"moved{number % 3}"] = holder.pop(name)


def replace_buffer(state: State, number: int) -> None:
    holder, name = owner(state, number, "_buffers")
    holder[name] = pick([torch.ones(2), None, parameter()], number)


def add_buffer(state: State, number: int) -> None:
    some(state, number).register_buffer(f"buf{number % 3}", torch.ones(2), bool(number % 2))


def flip_persistence(state: State, number: int) -> None:
    module = pick([m for m in state["model"].modules() if m._buffers] or [Block()], number)
    module._non_persistent_buffers_set ^= {pick(module._buffers, number)}


def replace_module(state: State, number: int) -> None:
    holder, name = owner(state, number, "_modules")
    made: list[Callable[[], Any]] = [
        Block,
        lambda: torch.nn.Linear(2, 2),
        lambda: WithExtra(2, 2),
        lambda: Renaming(2, 2),
        lambda: None,
        lambda: some(state, 0),
    ]
    holder[name] = pick(made, number // 3)() if number % 5 else torch.nn.ReLU()


def add_module(state: State, number: int) -> None:
    linear(state, number).add_module(f"below{number % 2}", torch.nn.Linear(2, 2))


def change_class(state: State, number: int) -> None:
    linear(state, number).__class__ = pick([WithExtra, Renaming, torch.nn.Linear], number // 3)


def replace_attributes(state: State, number: int) -> None:
    """Equal dicts in the place of those that were there, one tensor aside."""
    module = linear(state, number)
    module._parameters = {**module._parameters, "weight": parameter()}
    if number % 2:
        module.__dict__ = dict(vars(module))
        module._parameters["weight"] = parameter()


def own_method(state: State, number: int) -> None:
    tensor = torch.ones(2)

    def answer(*_: Any, destination: Any = None, prefix: str = "", **__: Any) -> Any:
        found = {} if destination is None else destination
        found[f"{prefix}own"] = tensor
        return found

    some(state, number).state_dict = answer


def hook(state: State, number: int) -> None:
    tensor = torch.ones(2)
    some(state, number)._register_state_dict_hook(
        lambda _, found, prefix, __: found.update({f"{prefix}hooked{number}": tensor})
    )


def pre_hook(state: State, number: int) -> None:
    tensor = torch.ones(2)
    some(state, number).register_state_dict_pre_hook(
        lambda module, *_: module._buffers.update(late=tensor)
    )


def unhook(state: State, _: int) -> None:
    for module in state["model"].modules():
        module._state_dict_hooks.clear()
        module._state_dict_pre_hooks.clear()
        vars(module).pop("state_dict", None)
    state["optimizer"]._optimizer_state_dict_pre_hooks.clear()
    state["optimizer"]._optimizer_state_dict_post_hooks.clear()
    vars(state["optimizer"]).pop("state_dict", None)


def optimizer_hook(state: State, number: int) -> None:
    more = {"more": torch.ones(2), "number": number}
    state["optimizer"].register_state_dict_post_hook(lambda _, content: {**content, **more})


def optimizer_pre_hook(state: State, number: int) -> None:
    state["optimizer"].register_state_dict_pre_hook(
        lambda optimizer: optimizer.param_groups[0].update(lr=number)
    )


def optimizer_method(state: State, number: int) -> None:
    content = {"number": number, "tensor": torch.ones(2)}
    state["optimizer"].state_dict = lambda: content


def last_kept(state: State, number: int) -> None:
    """A number becomes a dict, or nothing a text, while all tensors stay."""
    holder = kept(state, number)
    if holder:
        values = [{"inner": torch.ones(2)}, number, None, "text", True, torch.ones(2)]
        holder[[*holder][-1]] = pick(values, number // 3)


def rename_kept(state: State, number: int) -> None:
    holder = kept(state, number)
    if holder:
        holder["renamed"] = holder.pop([*holder][-1])


def turn_owners(state: State, _: int) -> None:
    """The same parameters and the same dicts, in the same order of dicts."""
    found = state["optimizer"].state
    pairs = [*zip([*found][::-1], found.values(), strict=True)]
    found.clear()
    found.update(pairs)


def change_inner(state: State, number: int) -> None:
    for holder in state["optimizer"].state.values():
        if isinstance(holder.get("note"), dict):
            holder["note"]["tensor"] = torch.ones(2)


def replace_kept(state: State, number: int) -> None:
    """A tensor, an equal one, a number, nothing, a text, or a dict."""
    holder = kept(state, number)
    name = pick(holder or ["step"], number)
    old = holder.get(name)
    new = old.clone() if isinstance(old, torch.Tensor) else torch.ones(2)
    holder[name] = pick([new, new, number, None, "text", {"inner": torch.ones(2)}], number // 5)


def add_kept(state: State, number: int) -> None:
    kept(state, number)[pick(["new", 7, "other"], number)] = pick([torch.ones(2), 3], number // 3)


def remove_kept(state: State, number: int) -> None:
    holder = kept(state, number)
    holder.pop(pick(holder or ["step"], number), None)


def forget_kept(state: State, number: int) -> None:
    state["optimizer"].state.pop(pick([*state["optimizer"].state] or [0], number), None)


def copy_kept(state: State, number: int) -> None:
    """Other dicts that hold the same tensors."""
    found = state["optimizer"].state
    for key in found:
        found[key] = dict(found[key])


def share_kept(state: State, number: int) -> None:
    """One dict of two parameters."""
    found = state["optimizer"].state
    if found:
        found[pick(found, number)] = kept(state, number // 7)


def number_kept(state: State, number: int) -> None:
    for holder in state["optimizer"].state.values():
        name = "note" if isinstance(holder.get("note"), int) else "step"
        holder[name] = holder.get(name, 0) + 1


def text_key(state: State, number: int) -> None:
    state["optimizer"].state["text"] = {"tensor": torch.ones(number % 2 + 1)}


def load(state: State, _: int) -> None:
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())


def assign(state: State, _: int) -> None:
    content = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    state["model"].load_state_dict(content, assign=True)


def add_group(state: State, _: int) -> None:
    state["optimizer"].add_param_group({"params": [parameter()], "lr": 0.25})


def change_group(state: State, number: int) -> None:
    group = pick(state["optimizer"].param_groups, number)
    values = [0.125, number, torch.ones(1), [1, torch.ones(2)], [1, 2], 1 << 70, "\ud800", None]
    group[pick(["lr", "weight_decay", "mine"], number)] = pick(values, number // 3)


def replace_member(state: State, number: int) -> None:
    members = pick(state["optimizer"].param_groups, number)["params"]
    if members:
        members[number % len(members)] = parameter()


def turn_groups(state: State, _: int) -> None:
    state["optimizer"].param_groups.reverse()


def move_member(state: State, _: int) -> None:
    """From one group into another: the numbers of all parameters stay."""
    first, second = state["optimizer"].param_groups[:2]
    if first["params"]:
        second["params"].insert(0, first["params"].pop())


def data(state: State, number: int) -> None:
    holder, name = owner(state, number)
    if holder[name] is not None:
        holder[name].data = torch.ones(number % 5 + 1)


def swap(state: State, number: int) -> None:
    """What an object is becomes another: it may be no parameter any more."""
    holder, name = owner(state, number)
    if type(holder[name]) is torch.nn.Parameter:
        holder[name].grad = None
        torch.utils.swap_tensors(holder[name], pick([parameter(), torch.ones(4)], number))


def replace_plain(state: State, number: int) -> None:
    name = pick([name for name in state if type(state[name]) is torch.Tensor] or ["new"], number)
    state[name] = torch.ones(9000 if name == "plain" else 2)


def rename_entry(state: State, number: int) -> None:
    name = pick(state, number)
    if name not in ("model", "optimizer"):
        state[f"{name}x"] = state.pop(name)


def turn_entries(state: State, _: int) -> None:
    items = [*state.items()][::-1]
    state.clear()
    state.update(items)


def add_entry(state: State, number: int) -> None:
    """Among them what the optimizer has as well, under another name."""
    entries = [
        number,
        torch.ones(5000),
        {"list": [torch.ones(2)], "number": number},
        kept(state, number),
        [kept(state, number)],
        dict(kept(state, number)),
        pick([*kept(state, number).values(), 3], number),
        some(state, number),
        copy(state["optimizer"]),
    ]
    state[pick(["extra", "model/0.first.weight", "model/mine"], number)] = pick(
        entries, number // 3
    )


def renew_entries(state: State, number: int) -> None:
    state["model"], state["optimizer"] = (training()[name] for name in ("model", "optimizer"))
    if number % 2:
        turn_entries(state, 0)


EDITS: list[Edit] = [
    step,
    replace_parameter,
    remove_parameter,
    delete_parameter,
    add_parameter,
    tie,
    move,
    replace_buffer,
    add_buffer,
    flip_persistence,
    replace_module,
    add_module,
    change_class,
    replace_attributes,
    own_method,
    hook,
    pre_hook,
    unhook,
    optimizer_hook,
    optimizer_pre_hook,
    optimizer_method,
    last_kept,
    rename_kept,
    turn_owners,
    change_inner,
    replace_kept,
    add_kept,
    remove_kept,
    forget_kept,
    copy_kept,
    share_kept,
    number_kept,
    text_key,
    load,
    assign,
    add_group,
    change_group,
    replace_member,
    turn_groups,
    move_member,
    data,
    swap,
    replace_plain,
    rename_entry,
    turn_entries,
    add_entry,
    renew_entries,
]
"""Each is one that a program might make between two snapshots, or could."""

Named = list[tuple[str, int]]
Answer = tuple[Named, Named, bytes] | str


def answer_of(adapted: MappingState) -> Answer:
    """Tensors by identity and in order, objects as bytes; what is raised, if anything."""
    try:
        adapted.refresh()
        lazy, boundary = adapted.tensors(), adapted.boundary_tensors()
        return _ids(lazy), _ids(boundary), _anew(adapted.objects()["structures"])
    except Exception as error:
        return _said(error)


def _anew(data: bytes) -> bytes:
    """The bytes of what they stand for: one may have an earlier encoding in it, and copies."""
    value = _unshared(decode(data, Part))
    return encode(value, lambda part: part if type(part) is Part else None)


def _unshared(value: Any) -> Any:
    if type(value) is dict:
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if type(value) is list else value


def _said(error: Exception) -> str:
    """Where a stack ends that has no end, and so what Python says of it, depends on its caller."""
    return RecursionError.__name__ if isinstance(error, RecursionError) else repr(error)


def _ids(tensors: dict[str, torch.Tensor]) -> Named:
    return [(name, id(tensor)) for name, tensor in tensors.items()]


def by_hand(state: State) -> Answer:
    """One entry after the other, nothing remembered, encoded in one go."""
    try:
        found = Enumeration()
        for name, value in state.items():
            enumerate_entry(found, name, value)

        def stored(part: Any) -> Part | None:
            name = found.name_of.get(id(part))
            return None if name is None else Part(name)

        return _ids(found.lazy), _ids(found.boundary), _anew(encode(found.structures, stored))
    except Exception as error:
        return _said(error)


@pytest.mark.parametrize("variant", range(len(NOTES) + 2))
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_one_edit_of_a_training_is_seen(edit: Edit, variant: int) -> None:
    for number in range(8):
        state = training(variant)
        adapted = MappingState(state)
        for _ in range(2):
            assert answer_of(adapted) == by_hand(state)
        edit(state, number)
        for _ in range(2):
            assert answer_of(adapted) == by_hand(state), number


edits = st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 999)), max_size=3)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(edits, max_size=6), st.integers(0, len(NOTES) + 1))
def test_whatever_is_edited_between_two_snapshots_is_seen(
    rounds: list[list[Any]], variant: int
) -> None:
    state = training(variant)
    adapted = MappingState(state)
    for made in rounds:
        assert answer_of(adapted) == by_hand(state)
        for edit, number in made:
            # After other edits torch may refuse one; whatever is left half done must be seen too.
            with suppress(Exception):
                edit(state, number)
    assert answer_of(adapted) == by_hand(state)


def test_what_is_kept_for_the_next_parameter_now_is_seen() -> None:
    """All keys and tensors stay, and their order; only whose one of them is changes."""
    state = training()
    first, second, *_ = state["optimizer"].state.values()
    first["own"] = torch.ones(2)
    adapted = MappingState(state)
    assert answer_of(adapted) == by_hand(state)
    following = {**dict([first.popitem()]), **second}
    second.clear()
    second.update(following)
    assert answer_of(adapted) == by_hand(state)


class Fragile:
    """Something whose state cannot be had at times."""

    broken = False

    def state_dict(self) -> State:
        if self.broken:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, content: State) -> None:
        pass


def test_what_was_seen_before_another_entry_raised_is_not_lost() -> None:
    state = {**training(), "fragile": Fragile()}
    adapted = MappingState(state)
    assert answer_of(adapted) == by_hand(state)
    replace_parameter(state, 0)
    state["fragile"].broken = True
    assert "not now" in answer_of(adapted)
    state["fragile"].broken = False
    assert answer_of(adapted) == by_hand(state)


def of_layers(count: int) -> State:
    """A usual training of so many layers; buffers are asked, as they are copied at once."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}
    step(state, 0)
    return state


def calls_after_a_step(folder: Path, count: int) -> Counter[str]:
    state = of_layers(count)

    def train() -> None:
        step(state, 0)
        state["schedule"].step()

    return calls_of_save(folder, state, train)


MOST_CALLS, MOST_C_CALLS = 2, 9
"""For each tensor: the state is enumerated at each save, and compared with the layout."""


def test_a_save_makes_so_many_calls_a_tensor(tmp_path: Path) -> None:
    few, many = (calls_after_a_step(tmp_path / str(count), count) for count in (2, 100))
    tensors = 98 * 2 * 4
    assert many["call"] - few["call"] <= MOST_CALLS * tensors, (few, many)
    assert many["c_call"] - few["c_call"] <= MOST_C_CALLS * tensors, (few, many)
