"""State of optimizers over DTensors lies where it lay: placements, dtypes, plain tensors beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ft.core.errors import StateMismatchError
from megatron_ft.trainer.placements import StatePlaces
from tests.support.captures import FakeSmp, bits, make_manager, saved


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Any]:
    """Of two ranks that never talk."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


def sharded(mesh: Any, shape: tuple[int, ...], value: torch.Tensor | None = None) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(shape)
    local = whole.chunk(2)[0].new_zeros(whole.chunk(2)[0].shape) if value is None else value
    given = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, [Shard(0)], **given)


def program(mesh: Any, optimizer: Any, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Parameters that are cut evenly and unevenly, and their optimizer."""
    parameters = [
        torch.nn.Parameter(sharded(mesh, shape).to(dtype)) for shape in [(8, 6), (7, 3), (5,)]
    ]
    return parameters, optimizer(parameters)


def step(parameters: list[Any], optimizer: Any, number: int) -> None:
    drawn = torch.Generator().manual_seed(number)
    for p in parameters:
        local = torch.randn(p._local_tensor.shape, generator=drawn).to(p.dtype)
        p.grad = sharded(p.device_mesh, tuple(p.shape), local)
    optimizer.step()


def facts(optimizer: Any) -> Any:
    """All that decides how the next step reads each tensor."""
    return {
        (number, key): (
            type(value),
            getattr(value, "placements", None),
            value.dtype,
            value.shape,
            bits(getattr(value, "_local_tensor", value)),
        )
        for number, kept in optimizer.state_dict()["state"].items()
        for key, value in kept.items()
    }


class Odd(torch.optim.Optimizer):
    """Keeps state that is placed unlike the parameter, or not at all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        for p in self.param_groups[0]["params"]:
            state, local = self.state[p], p.grad._local_tensor
            if not state:
                # Of the shape of a shard, and yet plain.
                state["plain"] = torch.zeros_like(local, dtype=torch.float64)
                everywhere = torch.zeros(3, dtype=torch.bfloat16)
                state["everywhere"] = DTensor.from_local(everywhere, p.device_mesh, [Replicate()])
                state["moment"] = torch.zeros_like(p, dtype=torch.float32)
            state["plain"] += local
            state["everywhere"]._local_tensor.add_(local.sum().bfloat16())
            state["moment"].add_(p.grad)
            p.add_(state["moment"].to(p.dtype), alpha=-0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW, Odd])
def test_state_over_shards_comes_back_as_it_lay(
    smp: FakeSmp, mesh: Any, optimizer: Any, dtype: torch.dtype
) -> None:
    parameters, first = program(mesh, optimizer, dtype)
    for number in (1, 2):
        step(parameters, first, number)
    saved(smp, {"parameters": parameters, "optimizer": first})
    others, fresh = program(mesh, optimizer, dtype)
    make_manager(smp).load(into={"parameters": others, "optimizer": fresh})
    assert facts(fresh) == facts(first)
    step(parameters, first, 3)
    step(others, fresh, 3)
    assert facts(fresh) == facts(first)
    assert [bits(p._local_tensor) for p in others] == [bits(p._local_tensor) for p in parameters]


def test_only_state_that_lies_elsewhere_is_noted(mesh: Any) -> None:
    parameters, ordinary = program(mesh, torch.optim.NAdam, torch.bfloat16)
    step(parameters, ordinary, 1)
    for optimizer, odd in ((ordinary, set[str]()), (Odd(parameters), {"plain", "everywhere"})):
        step(parameters, optimizer, 1)
        states = optimizer.state_dict()["state"].items()
        named = {f"o/state/{n}/{key}": t for n, kept in states for key, t in kept.items()}
        found = StatePlaces("o", optimizer).exceptions(named)
        assert {name.rpartition("/")[2] for name in found} == odd


def test_a_placement_that_cannot_be_made_anew_is_named(smp: FakeSmp, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial

    parameters, first = program(mesh, torch.optim.SGD, torch.float32)
    sums = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    first.state[parameters[0]]["sums"] = sums
    saved(smp, {"parameters": parameters, "optimizer": first})
    others, fresh = program(mesh, torch.optim.SGD, torch.float32)
    with pytest.raises(StateMismatchError, match=r"optimizer/state/0/sums was placed as Partial"):
        make_manager(smp).load(into={"parameters": others, "optimizer": fresh})


@pytest.mark.parametrize("capturable", [False, True])
def test_state_lies_on_its_own_device(capturable: bool) -> None:
    """NAdam keeps ``mu_product`` on the host beside ``step``, where torch's load would move it."""
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))  # stands for an accelerator
    optimizer = torch.optim.NAdam([parameter], capturable=capturable)
    home = "meta" if capturable else "cpu"
    devices = {"step": home, "mu_product": home, "exp_avg": "meta", "offloaded": "cpu"}
    live = {f"o/state/0/{key}": torch.ones(3, device=at) for key, at in devices.items()}
    places = StatePlaces("o", optimizer)
    noted = places.exceptions(live)
    numbers = [] if capturable else ["o/state/0/mu_product"]
    assert sorted(noted) == [*numbers, "o/state/0/offloaded"]
    stored = {name: torch.ones(3) for name in live}
    found = places.placed(stored, noted)
    assert {name.rpartition("/")[2]: one.device.type for name, one in found.items()} == devices
