"""Replicated tensors over two real gloo processes: captured in halves, restored whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer import restore
from megatron_ft.trainer.addresses import local_tensor
from tests.support.captures import WAIT, FakeSmp, bits, make_manager
from tests.support.warm_host import Request, WarmHost

WORLD = 2


def build(seed: int) -> dict[str, Any]:
    """The same model on all ranks; rank-local noise beside it."""
    from torch.distributed.tensor import Shard, distribute_tensor  # it takes seconds

    torch.manual_seed(seed)
    model = torch.nn.Linear(127, 255)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(seed + 1 + dist.get_rank())
    local = torch.randn(40_000)
    torch.manual_seed(seed + 10)
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = torch.nn.Linear(8, 10, bias=False)
    sharded.weight = torch.nn.Parameter(distribute_tensor(sharded.weight.data, mesh, [Shard(0)]))
    return {
        "model": model,
        "optimizer": optimizer,
        "local": local,
        "sharded": sharded,
        "sharded_optimizer": torch.optim.Adam(sharded.parameters()),
    }


def step(state: dict[str, Any]) -> None:
    """One step that is equal on all ranks."""
    state["optimizer"].zero_grad()
    state["model"](torch.ones(127)).square().sum().backward()
    for parameter in state["model"].parameters():
        # Sums of separate processes differ in their last bits; replicas are made equal by this.
        dist.all_reduce(parameter.grad)
    state["optimizer"].step()
    weight = state["sharded"].weight
    weight.grad = weight.detach().clone()
    state["sharded_optimizer"].step()


def fingerprint(state: dict[str, Any]) -> list[bytes]:
    """Weights, moments and the rank's own tensor."""
    tensors = [*state["model"].parameters(), state["local"], state["sharded"].weight]
    for name in ("optimizer", "sharded_optimizer"):
        for moments in state[name].state_dict()["state"].values():
            tensors += moments.values()
    return [bits(local_tensor(tensor)) for tensor in tensors]


def trainer(rank: int, directory: str) -> None:
    """Capture on both ranks, then restore into fresh objects and compare."""
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/store"
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=rendezvous)
    smp = FakeSmp(Path(directory), shard_id=f"pp0-tp0-dp{rank}-ep0")
    options: dict[str, Any] = {
        "shard_id": smp.shard_id,
        "replicated": {"model": dist.group.WORLD, "optimizer": dist.group.WORLD},
    }
    state = build(seed=1)
    step(state)
    manager = make_manager(smp, **options)
    manager.prepare(state)
    snapshot = smp.grant(1)
    assert manager.save(1, state).captured.result(WAIT)
    smp.wait_ended()
    wanted = fingerprint(state)
    manager.close()
    check_halves(smp.sealed_records[snapshot].tensor_bytes, state)

    smp.offer_last()
    for plain in (True, False):
        fresh = build(seed=50)
        with pytest.MonkeyPatch.context() as patch:
            if not plain:
                # Parts of tensors on a device are no bytes at an address.
                patch.setattr(restore, "is_plain_memory", lambda tensor: False)
            assert make_manager(smp, **options).load(into=fresh) == 1
        assert fingerprint(fresh) == wanted
    step(state)
    step(fresh)
    assert fingerprint(fresh) == fingerprint(state)
    with pytest.raises(LayoutMismatchError, match="declare it in `replicated`"):
        make_manager(smp, shard_id=smp.shard_id).load(into=build(seed=50))
    refuse_unequal_replicas(smp, options)
    dist.destroy_process_group()


def refuse_unequal_replicas(smp: FakeSmp, options: dict[str, Any]) -> None:
    """One bit that differs on one rank is found by both before anything is captured."""
    state, smp.offer = build(seed=1), None
    if dist.get_rank() == 1:
        weight = state["model"].weight.detach()
        weight.view(-1).view(torch.int32)[-1] ^= 1
    with pytest.raises(ConfigError, match="1 tensors declared replicated differ.*model.weight"):
        make_manager(smp, **options).prepare(state)


def check_halves(stored_bytes: int, state: dict[str, Any]) -> None:
    """Large replicated tensors in halves, the rest whole."""
    weight, bias = state["model"].weight.nbytes, state["model"].bias.nbytes
    expected = 3 * (weight // 2 + bias) + state["local"].nbytes
    expected += 3 * local_tensor(state["sharded"].weight).nbytes
    assert expected <= stored_bytes < expected + 2048


def test_split_tensors_are_restored_from_all_parts(warm_host: WarmHost, tmp_path: Path) -> None:
    entry, logs = f"{__name__}:main", str(tmp_path / "logs")
    outcome = warm_host.run(Request(entry, [str(tmp_path)], WORLD, logs, 150.0))
    assert not any(outcome.codes), outcome.story()


def main() -> None:
    """One rank, whose folder is its argument."""
    trainer(int(os.environ["RANK"]), sys.argv[1])
