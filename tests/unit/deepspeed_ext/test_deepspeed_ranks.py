"""Another number of ranks: what the JSON allows, the batch in parts, positions of loaders."""

from __future__ import annotations

import logging
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from deepspeed_ext import reshape
from deepspeed_ext.resumable_loader import ResumableLoader, shared_anew
from megatron_ft.core.errors import LayoutMismatchError

BATCH, SAMPLES = 2, 48
TOTAL, MICRO, STEPS = reshape._TOTAL, reshape._MICRO, reshape._ACCUMULATION


def engine(config: dict[str, Any], ranks: int, copies: int, experts: int = 0) -> Any:
    layers = [SimpleNamespace(ep_size=experts)] if experts else []
    return SimpleNamespace(
        _config=SimpleNamespace(_param_dict=config, **config),
        world_size=ranks,
        dp_world_size=copies,
        module=SimpleNamespace(modules=lambda: layers),
    )


@pytest.mark.parametrize(
    ("config", "ranks", "copies", "experts", "works"),
    [
        ({TOTAL: 24, MICRO: 2}, 4, 4, 0, [1, 2, 3, 4, 6, 12]),
        ({TOTAL: 24, STEPS: 4}, 2, 2, 0, [1, 2, 3, 6]),
        ({TOTAL: 6}, 2, 2, 0, [1, 2, 3, 6]),
        ({TOTAL: 8, MICRO: 2}, 4, 2, 0, [2, 4, 8]),
        ({TOTAL: 16, MICRO: 2}, 4, 4, 2, [2, 4, 8]),
    ],
)
def test_the_numbers_of_ranks_that_the_json_works_with(
    config: dict[str, Any], ranks: int, copies: int, experts: int, works: list[int]
) -> None:
    rule = reshape.rule_of(engine(config, ranks, copies, experts))
    assert rule is not None
    assert [n for n in range(1, 25) if not rule.against(n)] == works


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({MICRO: 2, STEPS: 1}, 'give "train_batch_size"'),
        ({TOTAL: 8, MICRO: 2, STEPS: 1}, "leave out one of the last two"),
        ({TOTAL: 8, "elasticity": {"enabled": True}}, "another batch"),
    ],
)
def test_a_json_for_one_number_of_ranks_is_told_apart(config: dict[str, Any], reason: str) -> None:
    fixed = engine(config, 4, 4)
    assert reshape.rule_of(fixed) is None
    assert reason in reshape.refusals(fixed)[0]


def objects(total: int, micro: int, steps: int, micro_steps: int, **numbers: Any) -> dict[str, Any]:
    batch = {TOTAL: total, MICRO: micro, STEPS: steps}
    counters = {"global_steps": 5, "micro_steps": micro_steps}
    training = {"counters": counters, "batch": batch, "schedules": {}}
    return {"training": training, "numbers": numbers, "shared": {}, "groups": [{"0": {"lr": 0.1}}]}


def of(old: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("pp0-tp0-dp0-ep0", old)]


def test_the_global_batch_stays_and_micro_batches_follow() -> None:
    made = reshape.reshaped(objects(24, 2, 4, 0), of(objects(24, 2, 3, 15)))
    assert made["training"]["batch"] == {TOTAL: 24, MICRO: 2, STEPS: 4}
    assert made["training"]["counters"] == {"global_steps": 5, "micro_steps": 20}
    assert made["groups"] == [{"0": {"lr": 0.1}}]
    # The script has doubled the batch on the way.
    doubled = reshape.reshaped(objects(24, 2, 4, 0), of(objects(48, 2, 6, 30)))
    assert doubled["training"]["batch"] == {TOTAL: 48, MICRO: 2, STEPS: 8}


@pytest.mark.parametrize(
    ("own", "old", "reason"),
    [
        (objects(24, 2, 4, 0), objects(20, 2, 5, 25), "20, cannot be shared by 3"),
        (objects(24, 2, 4, 0), objects(24, 2, 3, 16), "a step's middle"),
        (
            objects(24, 2, 4, 0, a={"step": 0}),
            objects(24, 2, 3, 15, a={"step": 5}, b={"step": 4}),
            "and they differ",
        ),
    ],
)
def test_what_other_ranks_cannot_continue_is_refused(
    own: dict[str, Any], old: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=reason):
        reshape.reshaped(own, of(old))


def test_numbers_of_masters_that_are_cut_otherwise_are_those_of_all() -> None:
    own = objects(24, 2, 4, 0, a={"step": 0}, b={"step": 0})
    old = objects(24, 2, 3, 15, a={"step": 5}, b={"step": 5}, c={"step": 5})
    assert reshape.reshaped(own, of(old))["numbers"] == {"a": {"step": 5}, "b": {"step": 5}}


def loader(rank: int, ranks: int) -> Any:
    data = range(SAMPLES)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3)
    return ResumableLoader(DataLoader(data, BATCH, sampler=sampler))


def drawn(loader: Any, batches: int) -> tuple[list[int], dict[str, Any]]:
    """The samples of so many batches, and the position behind them."""
    passing = iter(loader)
    samples = [i for batch in islice(passing, batches) for i in batch.tolist()]
    return samples, loader.state_dict()


@settings(deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]))
def test_no_sample_is_lost_or_read_again(before: int, now: int) -> None:
    """12 micro-batches a step, two steps a pass; one step by the old ranks, one by the new."""
    old = [drawn(loader(rank, before), 12 // before) for rank in range(before)]
    seen = [sample for samples, _ in old for sample in samples]
    for rank in range(now):
        fresh, (_, state) = loader(rank, now), old[rank % before]
        fresh.load_state_dict(shared_anew({"x": state}, (12 // now, 12 // before))["x"])
        assert "shared_anew" not in fresh.state_dict()
        seen += [sample for batch in fresh for sample in batch.tolist()]
    assert sorted(seen) == list(range(SAMPLES))


def test_a_step_that_crosses_an_epoch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _, state = drawn(loader(0, 3), 3)
    with caplog.at_level(logging.WARNING):
        loader(0, 2).load_state_dict(shared_anew({"x": state}, (3, 2))["x"])
    assert "up to 3 batches a rank are read a second time" in caplog.text


def test_samples_that_nobody_deals_out_are_refused() -> None:
    _, state = drawn(ResumableLoader(DataLoader(range(SAMPLES), BATCH, shuffle=True)), 4)
    fresh = ResumableLoader(DataLoader(range(SAMPLES), BATCH, shuffle=True))
    with pytest.raises(LayoutMismatchError, match="no DistributedSampler deals out"):
        fresh.load_state_dict(shared_anew({"x": state}, (3, 2))["x"])
