"""All ranks start from memory, or none does; property tests of that decision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.trainer import start_choice
from megatron_ft.trainer.start_choice import DiskStart, RankView, agree, choose_start

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
def test_a_start_is_refused_where_a_problem_leads_to_step_0(
    ranks: list[RankView],
) -> None:
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
