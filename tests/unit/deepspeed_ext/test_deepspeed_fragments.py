"""Where flat partitions lie in the model, and parameters put together again: no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.attachment import check_unique, mpu_rank
from deepspeed_ext.exporter import FileTensors, client_entries, fill
from deepspeed_ext.logical_map import MASTER, WEIGHT, fragments
from deepspeed_ext.optimizers.view import OwnedMaster, Weight, group_names
from megatron_ft.checkpoint.export import TensorRecipe
from megatron_ft.checkpoint.source import ShardBytes
from megatron_ft.core.errors import ConfigError, ExportError
from megatron_ft.core.shard import LogicalPlace, Piece, TensorSpec, plan_layout


@dataclass
class Partitions:
    """One rank's view of bf16 parameters that lie behind each other, cut in equal partitions."""

    parameters: list[Any]
    part: Any
    master: Any

    def owned(self) -> list[Any]:
        return self.parameters

    def masters(self) -> list[OwnedMaster]:
        return [OwnedMaster("optimizer/0", None, {}, self.master)]

    def weights(self) -> list[Weight]:
        return [Weight("weight/0", self.part, self.master)]


def cut(values: Any, sizes: list[int], order: list[int], ranks: int, padding: int) -> list[Any]:
    """The ranks' views; ``order`` is that of the parameters in memory."""
    size = -(-(len(values) + padding) // ranks)
    views = []
    for rank in range(ranks):
        flat = torch.zeros(size * ranks, dtype=torch.bfloat16)
        starts, position = {}, 0
        for index in order:
            starts[index] = position
            first = sum(sizes[:index])
            flat[position : position + sizes[index]] = values[first : first + sizes[index]]
            position += sizes[index]
        owned = [flat[starts[i] : starts[i] + n] for i, n in enumerate(sizes)]
        part = flat[rank * size : (rank + 1) * size]
        views.append(Partitions(owned, part, part.float()))
    return views


def shard(view: Partitions, kept: bool = False) -> ShardBytes:
    """What a snapshot of a rank holds; with ``kept`` weights, that are not the masters."""
    pieces: dict[str, list[Piece]] = {MASTER: [], WEIGHT: []}
    numbers = {id(p): number for number, p in enumerate(view.parameters)}
    for found in fragments(view):  # type: ignore[arg-type]
        for kind, parts in pieces.items():
            name = f"p{numbers[id(found.parameter)]}/{kind}"
            box = ((found.elements,), (found.start,), (found.numel,), found.offset, (1,))
            parts.append(Piece(name, *box))
    tensors = {"optimizer/0/master": (MASTER, view.master)}
    if kept:
        tensors["weight/0"] = (WEIGHT, view.part + 1)
    specs = [
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tensor.element_size(),
            tuple(tensor.shape),
            logical=LogicalPlace(0, tensor.numel(), tuple(pieces[kind])),
        )
        for name, (kind, tensor) in tensors.items()
    ]
    layout = plan_layout(specs)
    data = np.zeros(layout.tensor_bytes, dtype=np.uint8)
    for entry in layout.entries:
        raw = tensors[entry.name][1].contiguous().view(torch.uint8).numpy()
        data[entry.offset : entry.offset + entry.nbytes] = raw
    return ShardBytes(None, data, layout, b"", b"", 64, "test")  # type: ignore[arg-type]


sizes_of_parameters = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(sizes_of_parameters, st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 9))
def test_masters_of_all_ranks_make_every_parameter(
    sizes: list[int], random: Any, ranks: int, padding: int
) -> None:
    order = random.sample(range(len(sizes)), len(sizes))
    views = cut(torch.arange(1.0, sum(sizes) + 1), sizes, order, ranks, padding)
    covered = [sum(f.numel for f in fragments(view)) for view in views]
    assert sum(covered) == sum(sizes), "padding belongs to no parameter"
    for kept in (False, True):
        shards = {f"dp{rank}": shard(view, kept) for rank, view in enumerate(views)}
        captured = FileTensors(shards)
        for number, size in enumerate(sizes):
            wanted = TensorRecipe(MASTER, "bfloat16", (size,), 0, (1,), (f"p{number}", ()))
            made = captured.make("dp0", wanted)
            assert torch.equal(made, views[0].parameters[number] + kept)
            assert made.untyped_storage().nbytes() == made.nbytes


def test_a_missing_rank_is_named() -> None:
    views = cut(torch.arange(12.0), [12], [0], 2, 0)
    captured = FileTensors({"dp0": shard(views[0])})
    wanted = TensorRecipe(MASTER, "bfloat16", (12,), 0, (1,), ("p0", ()))
    with pytest.raises(ExportError, match="only parts of p0/fp32"):
        captured.make("dp0", wanted)


def test_what_a_rank_captured_itself_keeps_its_type_and_wish_for_gradients() -> None:
    (view,) = cut(torch.arange(12.0), [12], [0], 1, 4)
    captured = FileTensors({"dp0": shard(view)})
    wanted = TensorRecipe("optimizer/0/master", "float32", (12,), 0, (1,), None, True)
    made = captured.make("dp0", wanted)
    assert made.requires_grad and made.tolist() == list(range(12))
    assert made.untyped_storage().nbytes() == made.nbytes, "padding is not written"
    with pytest.raises(ExportError, match="dp0 holds no other"):
        captured.make("dp0", wanted._replace(name="other"))
    placeholder = captured.make("dp0", TensorRecipe("", "bfloat16", (0,), 0, (1,)))
    assert placeholder.shape == (0,) and placeholder.dtype == torch.bfloat16


DECLARED = {"step": "global_steps", "name": "constant"}


def objects(entries: dict[str, Any], given_at: int | None, step: int) -> dict[str, Any]:
    return {
        "training": {"counters": {"global_steps": step, "global_samples": 9, "skipped_steps": 0}},
        "client_state": {"entries": entries, "given_at": given_at, "step": step},
    }


def test_a_client_state_of_the_same_step_is_exported_as_it_is() -> None:
    assert client_entries(objects({"epoch": 2, "step": 7}, 7, 7), {}) == {"epoch": 2, "step": 7}


def test_an_older_one_follows_what_is_declared() -> None:
    found = client_entries(objects({"step": 5, "name": "run"}, 5, 7), DECLARED)
    assert found == {"step": 7, "name": "run"}


def test_an_older_one_with_an_unknown_entry_is_refused() -> None:
    with pytest.raises(ExportError, match="gave its client_state at step 5.*'epoch'"):
        client_entries(objects({"step": 5, "epoch": 1}, 5, 7), DECLARED)


def test_none_was_ever_given() -> None:
    assert client_entries(objects({}, None, 7), DECLARED) == {}
    assert client_entries({}, {}) == {}


def test_numbers_are_set_by_their_order_if_there_are_any() -> None:
    tree = {"optimizer": {"state": {0: {"step": 9}, 1: {"step": 9}}, "param_groups": []}}
    captured: dict[str, Any] = {"optimizer": {}, "groups": [{}], "numbers": {}}
    fill(tree, captured)
    assert tree["optimizer"]["state"] == {0: {"step": 9}, 1: {"step": 9}}
    fill(tree, captured | {"numbers": {"optimizer/a": {"step": 3}, "optimizer/b": {}}})
    assert tree["optimizer"]["state"] == {0: {"step": 3}, 1: {"step": 9}}


def test_a_form_with_other_states_than_the_snapshot_is_refused() -> None:
    tree = {"optimizer": {"state": {0: {}, 1: {}}, "param_groups": []}}
    captured = {"optimizer": {}, "groups": [{}], "numbers": {"optimizer/0": {}}}
    with pytest.raises(ExportError, match="2 optimizer states were recorded, 1 captured"):
        fill(tree, captured)


class OldMpu:
    """Has one name for both kinds of model parallelism."""

    def get_model_parallel_rank(self) -> int:
        return 3


class MegatronMpu(OldMpu):
    """Tells tensor ranks from those of the whole model."""

    def get_tensor_model_parallel_rank(self) -> int:
        return 1


NAMES = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")


@pytest.mark.parametrize(("mpu", "rank"), [(None, 0), (OldMpu(), 3), (MegatronMpu(), 1)])
def test_the_most_precise_method_counts(mpu: object, rank: int) -> None:
    assert mpu_rank(mpu, NAMES) == rank


def test_two_ranks_of_one_place_are_refused() -> None:
    check_unique(["pp0-tp0-dp0-ep0", "pp0-tp0-dp1-ep0"])
    with pytest.raises(ConfigError, match="ranks 1 and 2 are both pp0-tp0-dp1-ep0"):
        check_unique(["pp0-tp0-dp0-ep0", "pp0-tp0-dp1-ep0", "pp0-tp0-dp1-ep0"])


def test_groups_of_experts_keep_their_names_in_any_order() -> None:
    dense = [{"name": "decaying"}, {}]
    sparse = [{"name": name, "moe": True} for name in ("ep_size_2", "ep_size_4", "ep_size_2")]
    assert group_names(dense + sparse) == ["0", "1", "ep_size_2.0", "ep_size_4.0", "ep_size_2.1"]
    turned = [sparse[1], sparse[0], sparse[2]]
    assert group_names(dense + turned) == ["0", "1", "ep_size_4.0", "ep_size_2.0", "ep_size_2.1"]
