"""Small objects of a Megatron rank from those of another layout: what is taken, and refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.core.identity import shard_id
from megatron_ft.megatron.reshaped_objects import TakenOver, parallel_sizes, reshaped

IDENTITY = ("wd_mult", "is_expert_parallel")
Objects = dict[str, Any]


def sizes(tp: int = 1, pp: int = 1, dp: int = 4, **more: Any) -> Objects:
    args = SimpleNamespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        data_parallel_size=dp,
    )
    return parallel_sizes(args) | more


def group(wd_mult: float, rate: int = 0, *, expert: bool = False, **more: int) -> Objects:
    return {"wd_mult": wd_mult, "is_expert_parallel": expert, "rate": rate, **more}


def objects(where: Objects, iteration: int = 7, **more: Any) -> Objects:
    return {
        "version": 3,
        "iteration": iteration,
        "sizes": where,
        "copied_weights": 0,
        "numbers": [{}],
        "groups": [[group(1.0, iteration), group(0.0, iteration)]],
        "scalers": [None],
        "modules": {},
        "data_position": None,
        "random": {"of": "old"},
        "rerun_machine": {"mode": 1},
        "samples": {"consumed_train_samples": 56},
    } | more


def make(own: Objects, *origins: tuple[str, Objects], shard: str = shard_id()) -> TakenOver:
    return reshaped(own, shard, list(origins), IDENTITY)


def own(where: Objects, **more: Any) -> Objects:
    return objects(where, 0, random={"of": "own"}) | more


def test_counters_are_taken_and_the_rerun_machine_begins_anew() -> None:
    made = make(own(sizes(tp=2)), (shard_id(), objects(sizes()))).objects
    assert made["iteration"] == 7 and made["samples"] == {"consumed_train_samples": 56}
    assert made["rerun_machine"] is None
    assert made["sizes"] == sizes(tp=2)


def test_groups_are_found_by_their_identity_in_any_optimizer_of_any_shard() -> None:
    fresh = own(sizes(pp=2), groups=[[group(1.0, expert=True)], [group(0.0), group(1.0)]])
    first = objects(sizes(), groups=[[group(1.0, 5), group(0.0, 6)]])
    other = objects(sizes(), groups=[[group(1.0, 9, expert=True)]])
    made = make(fresh, (shard_id(pp=0), first), (shard_id(dp=1), other)).objects["groups"]
    assert made == [[group(1.0, 9, expert=True)], [group(0.0, 6), group(1.0, 5)]]


def test_all_groups_get_the_step_of_those_that_had_parameters() -> None:
    old = objects(sizes(), groups=[[group(1.0, step=0), group(0.0, step=6)], [group(2.0)]])
    fresh = own(sizes(pp=2), groups=[[group(2.0), group(0.0), group(1.0)]])
    (made,) = make(fresh, (shard_id(), old)).objects["groups"]
    assert [found["step"] for found in made] == [6, 6, 6]


def test_experts_that_are_spread_only_now_take_the_groups_of_all_others() -> None:
    fresh = own(sizes(), groups=[[group(1.0, expert=True)]], numbers=[{}])
    made = make(fresh, (shard_id(), objects(sizes(dp=2)))).objects["groups"]
    assert made == [[group(1.0, 7, expert=True)]]


@pytest.mark.parametrize(
    ("where", "shard", "random"),
    [
        (sizes(tp=2), shard_id(tp=1), None),
        (sizes(pp=2), shard_id(), None),
        (sizes(dp=3), shard_id(dp=2), {"of": "old"}),
        (sizes(vpp=2), shard_id(), {"of": "old"}),
        (sizes(random_per_rank=True), shard_id(), None),
    ],
)
def test_random_states_are_kept_while_tensor_and_pipeline_sizes_are(
    where: Objects, shard: str, random: Any
) -> None:
    found = make(own(where), (shard_id(), objects(sizes())), shard=shard)
    assert found.objects["random"] == random
    assert any("random states" in note and "anew" in note for note in found.notes) == (not random)


def test_a_rank_with_random_states_of_its_own_takes_only_those_of_its_number() -> None:
    old = shard_id(dp=1), objects(sizes(dp=2, random_per_rank=True))
    for dp, expected in ((1, {"of": "old"}), (3, None)):
        fresh = own(sizes(dp=4, random_per_rank=True))
        assert make(fresh, old, shard=shard_id(dp=dp)).objects["random"] == expected


def test_the_loss_scale_is_that_of_all() -> None:
    fresh = own(sizes(pp=2), scalers=[{"scale": 1.0}, {"scale": 1.0}])
    old = objects(sizes(), scalers=[{"scale": 64.0}])
    assert make(fresh, (shard_id(), old)).objects["scalers"] == [{"scale": 64.0}] * 2


def test_extra_states_are_those_of_the_same_part_of_the_model() -> None:
    fresh = own(sizes(pp=2, dp=1), modules={"drift": 0})
    first, second = (objects(sizes(pp=2), modules={"drift": pp + 1}) for pp in (0, 1))
    origins = (shard_id(), first), (shard_id(pp=1, dp=3), second)
    made = make(fresh, *origins, shard=shard_id(pp=1))
    assert made.objects["modules"] == {"drift": 2}
    with pytest.raises(LayoutMismatchError, match="drift keeps state outside"):
        make(own(sizes(pp=1), modules={}), *origins)
    empty = objects(sizes(pp=2), modules={"drift": b""})
    assert make(own(sizes(), modules={"drift": b""}), (shard_id(), empty))


def test_an_external_loader_goes_on_only_with_as_many_ranks() -> None:
    fresh = own(sizes(tp=2), data_position=b"")
    old = [(shard_id(dp=dp), objects(sizes(), data_position=[dp])) for dp in (0, 2)]
    made = make(fresh, *old, shard=shard_id(tp=1, dp=2))
    assert made.objects["data_position"] == [2]
    fewer = own(sizes(dp=2), data_position=b"")
    for changed, shard in ((fewer, shard_id(dp=0)), (fresh, shard_id(dp=1))):
        with pytest.raises(LayoutMismatchError, match="external data loader"):
            make(changed, *old, shard=shard)


def without(name: str) -> Callable[[Objects], None]:
    return lambda old: old.pop(name)


def setting(**values: Any) -> Callable[[Objects], None]:
    return lambda old: old.update(values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("sizes"), "does not say in which layout"),
        (setting(version=2), "does not say in which layout"),
        (setting(numbers=[{0: {"step": 3}}]), "numbers for single parameters"),
        (setting(copied_weights=2), "2 weights of pp0-tp0-dp0-ep0 were not their masters"),
        (setting(groups=[[group(1.0)]]), r"no old shard has a parameter group with \[0.0, False\]"),
        (
            setting(groups=[[group(1.0, 1), group(1.0, 2), group(0.0)]]),
            r"several parameter groups with \[1.0, False\] differ",
        ),
        (setting(scalers=[{"scale": 2.0}]), "scaled in only one"),
    ],
)
def test_what_has_no_meaning_in_another_layout_is_refused(
    change: Callable[[Objects], None], reason: str
) -> None:
    old = deepcopy(objects(sizes()))
    change(old)
    with pytest.raises(LayoutMismatchError, match=reason):
        make(own(sizes(tp=2)), (shard_id(), old))


def test_shards_of_two_iterations_are_refused() -> None:
    old = [(shard_id(dp=dp), objects(sizes(), 7 + dp)) for dp in (0, 1)]
    with pytest.raises(LayoutMismatchError, match="different iterations"):
        make(own(sizes(tp=2)), *old)
