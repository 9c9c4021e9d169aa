"""What a trainer says of its end: that its plan is done, that it is not, or nothing."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.trainer.manager import _close_all, _say_ends
from tests.support.captures import FakeSmp, make_manager


@pytest.mark.parametrize(
    ("last", "setting", "finished", "expected"),
    [
        (0, 0, None, []),
        (0, 0, True, [(2, True)]),
        (0, 0, False, [(2, False)]),
        (2, 0, None, [(2, True)]),
        (3, 0, None, [(2, False)]),
        (0, 3, None, [(2, False)]),
        (2, 3, None, [(2, True)]),
        (3, 0, True, [(2, True)]),
    ],
)
def test_the_plan_is_done_with_its_last_iteration(
    smp: FakeSmp, last: int, setting: int, finished: bool | None, expected: list[tuple[int, bool]]
) -> None:
    state = {"weight": torch.zeros(4)}
    manager = make_manager(smp, last=last, settings={"last_iteration": setting})
    manager.load(into=state)
    for iteration in (1, 2):
        manager.save(iteration, state)
    manager.close(finished=finished)
    manager.close(finished=True)
    assert smp.endings == expected


def test_a_script_that_never_closes_says_it_as_it_exits(smp: FakeSmp) -> None:
    manager = make_manager(smp, last=5)
    manager.save(5, {"weight": torch.zeros(4)})
    _say_ends()
    manager.close()
    assert smp.endings == [(5, True)]


def test_a_restart_in_process_is_no_end(smp: FakeSmp) -> None:
    make_manager(smp, last=5).save(1, {"weight": torch.zeros(4)})
    _close_all()
    assert smp.endings == []
