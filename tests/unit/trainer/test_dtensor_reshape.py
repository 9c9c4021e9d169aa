"""DTensors of one mesh restored into those of another: places, and FSDP2 that trains on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ft.core.errors import LayoutMismatchError, StateMismatchError
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.state import RngState
from tests.support.fake_ranks import as_rank
from tests.support.late_capture import LOAD_FROM, RESHAPE_FROM, SAVE_AT, SAVE_TO
from tests.support.warm_host import Request, WarmHost

SNAPSHOT_AT, ITERATIONS = 4, 8


def shard_of(whole: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """The DTensor of this rank, cut as FSDP2 and tensor parallelism do, one mesh axis at a time."""
    from torch.distributed.tensor import DTensor

    local = whole
    for size, at, placed in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if placed.is_shard():
            parts = local.chunk(size, placed.dim)
            local = parts[at] if at < len(parts) else local.narrow(placed.dim, 0, 0)
    given = (mesh, placements)
    return DTensor.from_local(local, *given, shape=whole.shape, stride=whole.stride())


def meshes() -> Iterator[Any]:
    from torch.distributed.tensor import Replicate, Shard

    yield (4,), (Shard(0),)
    yield (4,), (Shard(1),)
    yield (2, 2), (Replicate(), Shard(0))
    yield (2, 2), (Shard(0), Shard(1))
    yield (2, 2), (Shard(0), Shard(0))
    yield (2, 2), (Replicate(), Replicate())


@pytest.mark.parametrize("shape", [(8, 6), (7, 3), (3, 5), (2, 1)], ids=str)
def test_the_places_of_all_ranks_are_where_their_shards_were_cut(shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    for sizes, placements in meshes():
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank in range(4):
            with as_rank(rank, 4):
                mesh = init_device_mesh("cpu", sizes)
                state = MappingState({"model": {"weight": shard_of(whole, mesh, placements)}})
                place = state.logical_map()["model/weight"]
                local = state.tensors() | state.boundary_tensors()
            (piece,) = place.pieces
            assert (piece.global_name, piece.global_shape) == ("model/weight", shape)
            assert torch.equal(whole[piece.box], local["model/weight"])
            seen[piece.box] += 1
        copies = [n for n, p in zip(sizes, placements, strict=True) if p.is_replicate()]
        assert (seen == torch.Size(copies).numel()).all()


def test_a_dtensor_whose_place_is_not_known_is_named_when_a_reshape_is_wanted() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        state = MappingState({"sums": partial, "plain": torch.ones(3)})
        assert state.logical_map() == {}
        with pytest.raises(LayoutMismatchError, match="sums first: it is placed as Partial"):
            state.expect_reshape()


def test_fsdp_over_tensor_parallelism_is_refused() -> None:
    """Its shards are cut in another order than the axes of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Linear(8, 8, bias=False)
        half = shard_of(model.weight.detach(), mesh["tp"], [Shard(0)])
        model.weight = torch.nn.Parameter(half)
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(LayoutMismatchError, match="model/weight first: .*_StridedShard"):
            MappingState({"model": model}).expect_reshape()


def test_an_optimizer_that_nobody_knows_is_refused_before_its_first_step() -> None:
    optimizer = torch.optim.Adafactor(torch.nn.Linear(2, 2).parameters())
    said = r"optimizer has no moments yet .*Adafactor is not known.*register_optimizer\(Adafactor,"
    with pytest.raises(StateMismatchError, match=said):
        MappingState({"optimizer": optimizer}).expect_reshape()


def test_random_states_stay_where_there_was_no_such_rank() -> None:
    """All else is as on the nearest."""
    state: dict[str, Any] = {"rng": RngState(), "progress": {"iteration": 0}}
    torch.manual_seed(1)
    state["progress"]["iteration"] = 5
    objects = MappingState(state).objects()
    for shard, expected in (("pp0-tp0-dp0-ep0", 1), ("pp0-tp0-dp7-ep0", 2)):
        state["progress"]["iteration"] = 0
        torch.manual_seed(2)
        adapted = MappingState(state)
        adapted.expect_reshape()
        adapted.load(adapted.reshape_objects(shard, [("pp0-tp0-dp0-ep0", objects)]))
        assert torch.initial_seed() == expected
        assert state["progress"]["iteration"] == 5


def run(host: WarmHost, folder: Path, mesh: str, name: str, **more: str) -> list[Any]:
    """Train on so many ranks as the mesh has; what each of them wrote."""
    ranks = torch.Size(map(int, mesh.split())).numel()
    environment = {
        "TEST_MESH": mesh,
        "TEST_TRACE": str(folder / name),
        SAVE_TO: str(folder / name / "arenas"),
    }
    entry, logs = "tests.programs.fsdp_program:train", str(folder / name / "logs")
    outcome = host.run(Request(entry, [], ranks, logs, 100.0, environment | more))
    assert not any(outcome.codes), outcome.story()
    return [json.loads((folder / name / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(("4", "2"), id="4-to-2", marks=pytest.mark.all_layouts),
        pytest.param(("2", "4"), id="2-to-4"),
        pytest.param(("2 2", "3"), id="replicated-to-3"),
    ],
)
def test_fsdp2_trains_on_with_another_number_of_ranks(
    meshes: tuple[str, str], warm_host: WarmHost, tmp_path: Path
) -> None:
    """Losses and weights are those of the uninterrupted run, but for the order of sums."""
    whole = run(warm_host, tmp_path, meshes[0], "whole", **{SAVE_AT: str(SNAPSHOT_AT)})
    arenas = str(tmp_path / "whole" / "arenas")
    after = run(warm_host, tmp_path, meshes[1], "after", **{RESHAPE_FROM: arenas})
    for number, rank in enumerate(after):
        assert list(rank["losses"]) == [str(i) for i in range(SNAPSHOT_AT + 1, ITERATIONS + 1)]
        for at, loss in rank["losses"].items():
            assert loss == pytest.approx(whole[0]["losses"][at], rel=1e-12)
        for name, rows in rank["whole"].items():
            left, right = (
                torch.tensor(w, dtype=torch.float64) for w in (rows, whole[0]["whole"][name])
            )
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
        first, second = torch.rand(2, generator=torch.Generator().manual_seed(100 + number))
        assert rank["drawn"] == float(second if number < len(whole) else first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "way"),
    [
        pytest.param("4", "", id="uneven"),
        pytest.param("2 2", "", id="replicated"),
        pytest.param("2", "mixed", id="mixed precision"),
        pytest.param("2", "offloaded", id="offloaded"),
        pytest.param("2", "accumulated", id="accumulated"),
        pytest.param("2 2", "tensor", id="tensor parallel"),
    ],
)
def test_fsdp2_continues_bit_for_bit_on_the_same_mesh(
    mesh: str, way: str, warm_host: WarmHost, tmp_path: Path
) -> None:
    given = {"TEST_WAY": way}
    whole = run(warm_host, tmp_path, mesh, "whole", **given, **{SAVE_AT: str(SNAPSHOT_AT)})
    arenas = str(tmp_path / "whole" / "arenas")
    after = run(warm_host, tmp_path, mesh, "after", **given, **{LOAD_FROM: arenas})
    for rank, before in zip(after, whole, strict=True):
        assert list(rank["losses"]) == [str(i) for i in range(SNAPSHOT_AT + 1, ITERATIONS + 1)]
        assert rank["losses"] == {at: before["losses"][at] for at in rank["losses"]}
        assert rank["whole"] == before["whole"]
