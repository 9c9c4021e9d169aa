"""The start of a rank: its number, its arena, who copies; all start from memory, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ft.arena import digest
from megatron_ft.core import environment
from megatron_ft.core.errors import ConfigError, NotUnderSupervisorError
from megatron_ft.core.shard import pack_meta
from megatron_ft.trainer import cuda, manager, start_choice
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.engine import (
    META_SPARE_BYTES,
    PLANNING_BLOCK_BYTES,
    choose_copier,
    required_bytes,
)
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.plan import plan_state
from megatron_ft.trainer.start_choice import DiskStart, RankView, agree, choose_start


@given(st.integers(0, 200_000), st.integers(0, 300_000), st.integers(16, 22))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_objects_may_double_and_grow_by_the_spare_in_blocks_of_any_size(
    elements: int, text: int, shift: int
) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(elements), "text": "x" * text}
    adapted = MappingState(state)
    layout = plan_state(adapted, 1 << 30)
    room = required_bytes(layout, adapted.objects(), b"form")
    meta = len(pack_meta(layout.to_bytes(), adapted.objects(), b"form"))
    assert 1 << shift >= PLANNING_BLOCK_BYTES
    grown = 2 * meta + META_SPARE_BYTES
    assert digest.required_bytes(layout.tensor_bytes, grown, 1 << shift) <= room


def test_what_lies_in_host_memory_is_copied_without_a_device() -> None:
    state = MappingState({"weight": torch.zeros(3)})
    assert type(choose_copier(state)) is CpuCopier


def test_tensors_of_a_device_are_copied_from_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current device is: a program may name its device at each call."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda, "CudaCopier", lambda *words, threads: made.append(words))
    with FakeTensorMode():
        one, two = (torch.zeros(3, device=f"cuda:{number}") for number in (1, 2))
        host = torch.zeros(5)
    choose_copier(MappingState({"host": host, "one": one}))
    assert made == [(1,)]
    with pytest.raises(ConfigError, match="2 devices .one on cuda:1, two on cuda:2.*one rank for"):
        choose_copier(MappingState({"one": one, "two": two}))


def test_a_rank_takes_its_number_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (manager.env_int("RANK", 0), manager.env_int("WORLD_SIZE", 1)) == (7, 1)


def test_without_a_supervisor_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.JOB, raising=False)
    for begin in (lambda: manager.connect(0), lambda: manager.watch(0)):
        with pytest.raises(NotUnderSupervisorError, match="megatron-ft run"):
            begin()


iterations = st.integers(-1, 50)
disks = st.builds(
    DiskStart, iterations, st.sampled_from(["", "the checkpoint 'best'"]), to_resume=st.booleans()
)
problems = st.sampled_from(["", "", "the loader has no position"])
views = st.builds(
    RankView, iterations, disks, st.booleans(), st.booleans(), problems, st.booleans()
)
same_offer = st.tuples(iterations, st.lists(views, min_size=1, max_size=6)).map(
    lambda drawn: [view._replace(offered=drawn[0]) for view in drawn[1]]
)


@given(st.lists(views, min_size=1, max_size=6) | same_offer)
def test_memory_serves_all_ranks_or_none(ranks: list[RankView]) -> None:
    decision = choose_start(ranks)
    disk, offers = ranks[0].disk, {view.offered for view in ranks}
    usable = len(offers) == 1 and max(offers) >= 0
    usable = usable and not any(view.disk_only or view.problem for view in ranks)
    other_wanted = bool(disk.asked) and any(view.wish_changed for view in ranks)
    rewound = any(view.rewound for view in ranks)
    newer = disk.iteration > max(offers) or (disk.to_resume and disk.iteration == max(offers))
    newer_on_disk = not disk.asked and newer and not rewound
    assert decision.from_memory == (usable and not other_wanted and not newer_on_disk)
    assert decision.reason


def test_what_stands_in_the_way_is_said() -> None:
    view = RankView(8, DiskStart(6))
    assert choose_start([view, view])[:2] == (True, "newer than what is on disk (iteration 6)")
    tie = [RankView(8, DiskStart(8))] * 2
    assert choose_start(tie)[:2] == (True, "as new as what is on disk (iteration 8)")
    doubtful = [RankView(8, DiskStart(8, to_resume=True))] * 2
    assert choose_start(doubtful)[:2] == (
        False,
        "the checkpoint of iteration 8 was saved to be resumed from",
    )
    reason = choose_start([view, view._replace(problem="no position")]).reason
    assert reason == "no position"
    assert "ranks [1]" in choose_start([view, view._replace(offered=4)]).reason


@given(st.lists(views, min_size=1, max_size=6) | same_offer)
def test_a_start_is_refused_where_a_problem_leads_to_step_0(ranks: list[RankView]) -> None:
    """And only if a rank insists; nothing is declined then, so the next start is offered it."""
    insisting = [view._replace(insists=True) for view in ranks]
    usual, decision = choose_start(ranks), choose_start(insisting)
    assert not usual.refused and decision[:2] == usual[:2]
    at_0 = not decision.from_memory and ranks[0].disk.iteration < 0
    assert decision.refused == (at_0 and decision.reason in {view.problem for view in ranks})
    declined: list[str] = []
    manager = SimpleNamespace(decline=lambda reason, iteration: declined.append(reason))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_choice, "_all_ranks", lambda view: insisting)
        agree(insisting[0], manager)  # type: ignore[arg-type]
    assert bool(declined) == (not decision.from_memory and not decision.refused)
