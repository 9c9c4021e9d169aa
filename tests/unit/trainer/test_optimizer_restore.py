"""Optimizers come back with the state that they had: dtypes, shapes, and objects of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from megatron_ft import register_class
from megatron_ft.core.errors import StateMismatchError
from tests.support.captures import FakeSmp, bits, make_manager, saved

EVERY = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
)
"""All optimizers of torch, those of later releases too."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 1.0}],
    "Adadelta": [{"capturable": False}],
    "Adagrad": [{"fused": True}],
    "Adam": [{"amsgrad": True}, {"fused": True}, {"lr": torch.tensor(0.01), "foreach": False}],
    "AdamW": [{"amsgrad": True, "foreach": True}, {"fused": True}],
    "LBFGS": [{"history_size": 2, "line_search_fn": "strong_wolfe", "max_iter": 3}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "SGD": [{"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "fused": True}],
}
"""Options under which they keep other state."""

NO_FOREACH = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}

NOT_IN_HALF = {"strong_wolfe"}
"""Options with which torch's step overflows in fp16."""


class Case(NamedTuple):
    """An optimizer with its options, and the dtype of its parameters."""

    optimizer: str
    options: dict[str, Any]
    dtype: torch.dtype

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.optimizer}({options})-{str(self.dtype).removeprefix('torch.')}"


def cases() -> Iterator[Case]:
    for name in EVERY:
        foreach = [] if name in NO_FOREACH else [{"foreach": True}]
        for options in [{}, *foreach, *OPTIONS.get(name, [])]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                values = {value for value in options.values() if isinstance(value, str)}
                if dtype is not torch.float16 or not values & NOT_IN_HALF:
                    yield Case(name, options, dtype)


class Program:
    """What a process makes when it starts, and trains."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, sparse: bool = False
    ) -> None:
        self.model: Any = torch.nn.Linear(6, 4, bias=False)
        if sparse:
            self.model = torch.nn.Embedding(8, 4, sparse=True)
        self.model.to(dtype)
        self.optimizer = make(self.model.parameters())
        self.dtype, self.sparse = dtype, sparse
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, *steps: int) -> None:
        for step in steps:
            drawn = torch.Generator().manual_seed(step)
            given = torch.randn(3, 6, generator=drawn).to(self.dtype)
            content = torch.randint(8, (5,), generator=drawn) if self.sparse else given
            self.optimizer.step(lambda content=content: self._loss(content))

    def _loss(self, content: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(content).square().mean()
        loss.backward()
        return float(loss.detach())

    def everything(self) -> Any:
        return exactly({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def exactly(value: Any) -> Any:
    """Dtypes, shapes, devices, bits and classes of all that is in a value, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), str(value.device), bits(value)
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [exactly(inner) for inner in value]
    return type(value), repr(value) if isinstance(value, float) else value


def resumed(smp: FakeSmp, make: Callable[[], Program]) -> tuple[Program, Program]:
    """A program that trained on, and one of a fresh process that was restored; both compared."""
    torch.manual_seed(1)
    first = make()
    first.train(1, 2, 3)
    saved(smp, first.state)
    torch.manual_seed(2)
    fresh = make()
    assert make_manager(smp).load(into=fresh.state) == 1
    assert fresh.everything() == first.everything()
    for program in (first, fresh):
        program.train(4, 5)
    assert fresh.everything() == first.everything()
    return first, fresh


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_optimizer_of_torch_resumes_with_the_state_that_it_had(
    smp: FakeSmp, case: Case
) -> None:
    def make(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(
            parameters, **copy.deepcopy(case.options)
        )
        return made

    resumed(smp, lambda: Program(make, case.dtype, sparse=case.optimizer == "SparseAdam"))


class Pair(NamedTuple):
    """Two preconditioners, of other shapes than the parameter."""

    left: torch.Tensor
    right: torch.Tensor


register_class(Pair)


class Own(torch.optim.Optimizer):
    """Keeps state of many forms, of which torch's load_state_dict would change nearly each."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group)

    @torch.no_grad()
    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["quantized"] = torch.zeros(p.shape, dtype=torch.int8)
            state["mask"] = torch.zeros(p.shape, dtype=torch.bool)
            state["factors"] = [torch.eye(n, dtype=torch.float64) for n in p.shape]
            state["nested"] = {"pair": Pair(torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16))}
            state["step"], state["mode"], state["seen"] = 0, "warm", torch.zeros(())
        gradient = p.grad.float()  # type: ignore[union-attr]
        state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        state["quantized"].copy_((gradient.clamp(-1, 1) * 127).round())
        state["mask"].copy_(gradient > 0)
        state["factors"][0].addmm_(gradient.double(), gradient.double().t())
        state["nested"]["pair"].left.add_(gradient.sum())
        state["seen"] += 1
        state["step"] += 1
        scaled = state["exp_avg"] / state["factors"][0].trace() * (1 + state["mask"].float())
        p.add_(scaled.to(p.dtype), alpha=-group["lr"])
        assert state["mode"] == "warm"


class Casting(Own):
    """Loads without torch, and casts as torch does."""

    def load_state_dict(self, state_dict: Any) -> None:
        def cast(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(torch.bfloat16) if floating else value

        owners = [p for group in self.param_groups for p in group["params"]]
        for number, kept in state_dict["state"].items():
            self.state[owners[number]] = {key: cast(value) for key, value in kept.items()}


class Early(Own):
    """Has state in a dtype that it does not keep, before it is loaded."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg"] = torch.zeros(p.shape, dtype=torch.float16)

    def _update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 1:
            state.clear()
        super()._update(p, state, group)


class Wrapper:
    """A wrapper as of training libraries: no optimizer of torch itself."""

    def __init__(self, parameters: Any) -> None:
        self.inner = Own(parameters)
        self.step, self.zero_grad = self.inner.step, self.inner.zero_grad
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups


def casting_hook(parameters: Any) -> Own:
    """An optimizer whose hook moves state to the dtype of the parameters."""
    made = Own(parameters)

    def cast(optimizer: Any) -> None:
        for p, state in optimizer.state.items():
            state["exp_avg"] = state["exp_avg"].to(p.dtype)

    made.register_load_state_dict_post_hook(cast)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Own, Casting, Early, Wrapper, casting_hook])
def test_any_optimizer_resumes_with_the_state_that_it_had(
    smp: FakeSmp, make: Any, dtype: torch.dtype
) -> None:
    resumed(smp, lambda: Program(make, dtype))


def test_groups_and_their_tensors_stay_the_same_objects(smp: FakeSmp) -> None:
    """A script may hold a group, or the tensor that it made the rate of."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    state = {"model": model, "optimizer": optimizer}
    saved(smp, state)
    group, rate = optimizer.param_groups[0], optimizer.param_groups[0]["lr"]
    rate.fill_(0.25)
    group["betas"] = (0.0, 0.0)
    make_manager(smp).load(into=state)
    assert optimizer.param_groups[0] is group and group["lr"] is rate
    assert rate == 0.5 and group["betas"] == (0.9, 0.999)


def test_hooks_see_the_state_and_may_change_the_groups(smp: FakeSmp) -> None:
    first, other = (Program(torch.optim.NAdam, torch.bfloat16) for _ in range(2))
    fresh, seen = other.optimizer, list[Any]()
    saved(smp, first.state)

    def before(optimizer: Any, content: dict[str, Any]) -> dict[str, Any]:
        seen.append(optimizer)
        return {**content, "param_groups": [{**g, "lr": 7.0} for g in content["param_groups"]]}

    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(seen.append)
    make_manager(smp).load(into=other.state)
    assert seen == [fresh, fresh] and fresh.param_groups[0]["lr"] == 7.0


class Copying(Casting):
    """Its state_dict is of no use for putting state back."""

    def state_dict(self) -> dict[str, Any]:
        content = super().state_dict()
        states = content["state"].items()
        return {**content, "state": {number: dict(kept) for number, kept in states}}


def test_state_that_cannot_be_put_back_is_named_with_both_dtypes(smp: FakeSmp) -> None:
    first = Program(Copying, torch.float32)
    first.train(1)
    saved(smp, first.state)
    with pytest.raises(
        StateMismatchError,
        match=r"optimizer/state/0/exp_avg is bfloat16\[4, 6\] once it was loaded, in the snapshot "
        r"float32\[4, 6\]: Copying.load_state_dict has changed it",
    ):
        make_manager(smp).load(into=Program(Copying, torch.float32).state)
    assert [type(error) for error in smp.unfit_errors] == [StateMismatchError]


class Checkpointer:
    """As tutorials wrap model and optimizer for torch.distributed.checkpoint."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.program.model, self.program.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.program.model,
            self.program.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )


def test_an_optimizer_inside_another_object_keeps_its_dtypes(smp: FakeSmp) -> None:
    first, fresh = (Program(torch.optim.NAdam, torch.bfloat16) for _ in range(2))
    first.train(1, 2)
    saved(smp, {"all": Checkpointer(first)})
    make_manager(smp).load(into={"all": Checkpointer(fresh)})
    first.train(3)
    fresh.train(3)
    assert exactly(fresh.optimizer.state_dict()["state"]) == exactly(
        first.optimizer.state_dict()["state"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_of_another_dtype_are_no_other_parallel_layout(
    smp: FakeSmp, dtype: torch.dtype
) -> None:
    saved(smp, Program(torch.optim.Adam, torch.bfloat16).state)
    named = rf"model/weight is {str(dtype)[6:]}\[4, 6\], in the snapshot bfloat16\[4, 6\]"
    with pytest.raises(StateMismatchError, match=named):
        make_manager(smp).load(into=Program(torch.optim.Adam, dtype).state)
