"""Decides whether an incarnation of the job starts from memory or disk: once, by all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ft.core.environment import RESTORE

if TYPE_CHECKING:
    from megatron_ft.trainer.manager import SnapshotManager

WISH = "load_wish"
"""Key, in a snapshot's objects, of what the user asked the framework to load in that
incarnation."""


class DiskStart(NamedTuple):
    """The iteration that the framework itself would start from, -1 if it would load nothing.

    ``asked`` is how the user named that checkpoint, empty if it is just the newest.
    ``to_resume`` says that the framework saved it to be resumed from, and that it holds more than
    a snapshot of the same iteration: what Megatron has found out about a doubtful result.
    """

    iteration: int
    asked: str = ""
    to_resume: bool = False

    def goes_before(self, offered: int) -> bool:
        """True if it goes before a snapshot of iteration ``offered``; of equal ones memory serves,
        unless the checkpoint holds more."""
        return self.iteration > offered or (self.to_resume and self.iteration == offered)


class RankView(NamedTuple):
    """The view of one rank before the decision.

    ``offered`` is the iteration of its snapshot in memory, -1 for none; ``disk_only`` is True
    if the supervisor decided for disk; ``wish_changed`` if the user asks for another
    checkpoint than in the incarnation of the snapshot; ``problem`` says why this rank cannot use
    the snapshot, empty if it can; ``rewound`` is True if newer checkpoints are of what was given
    up; ``insists`` if it must not start from scratch because of such a problem.
    """

    offered: int
    disk: DiskStart
    disk_only: bool = False
    wish_changed: bool = False
    problem: str = ""
    rewound: bool = False
    insists: bool = False


class StartDecision(NamedTuple):
    """The decision, and the reason for it; ``refused`` means that training must not start."""

    from_memory: bool
    reason: str
    refused: bool = False


def supervisor_chose_disk(environment: Mapping[str, str] | None = None) -> bool:
    """True if the supervisor decided that this incarnation starts from the framework's own
    files."""
    return (os.environ if environment is None else environment).get(RESTORE) == "disk"


def choose_start(views: Sequence[RankView]) -> StartDecision:
    """Choose for all ranks from what they see, by rank; what is on disk, the first one says.

    Memory serves if every rank has the same snapshot, and what the framework would load is
    not newer.  If both are of one iteration, memory serves, unless the framework saved the
    checkpoint to be resumed from.  A checkpoint that the user names, and did not name when the
    snapshot was taken, is what he wants, even if it is older; one that he named before was loaded
    before.
    """
    disk, newest = views[0].disk, max(view.offered for view in views)
    if newest < 0:
        return StartDecision(False, "no snapshot is in memory")
    if any(view.disk_only for view in views):
        return StartDecision(False, "the job decided to start from disk")
    if any(view.offered != newest for view in views):
        lacking = [rank for rank, view in enumerate(views) if view.offered != newest]
        return StartDecision(
            False, f"ranks {lacking} were not offered the snapshot of iteration {newest}"
        )
    if disk.asked and any(view.wish_changed for view in views):
        return StartDecision(False, f"{disk.asked} was asked for")
    rewound = any(view.rewound for view in views)
    if not disk.asked and disk.goes_before(newest) and not rewound:
        newer = "is newer" if disk.iteration > newest else "was saved to be resumed from"
        return StartDecision(False, f"the checkpoint of iteration {disk.iteration} {newer}")
    problem = next((view.problem for view in views if view.problem), "")
    if problem:
        refused = disk.iteration < 0 and any(view.insists for view in views)
        return StartDecision(False, problem, refused)
    if disk.asked:
        return StartDecision(True, f"{disk.asked} was loaded in an earlier incarnation")
    if disk.goes_before(newest):
        return StartDecision(
            True, f"the job was rewound to before what is on disk ({_disk_text(disk)})"
        )
    how = "as new as" if disk.iteration == newest else "newer than"
    return StartDecision(True, f"{how} what is on disk ({_disk_text(disk)})")


def agree(view: RankView, manager: SnapshotManager) -> StartDecision | None:
    """Decide with all other ranks; the manager declines what is not used.  Collective.

    Of a start that is refused nothing is declined: the next one is offered the same.

    None if no rank was offered anything: there was nothing to decide.
    """
    # The supervisor gave up what is newer than the snapshot, on disk as well.
    rewound = os.environ.get(RESTORE) == "rewound"
    views = _all_ranks(view._replace(rewound=rewound))
    start = choose_start(views)
    if not (start.from_memory or start.refused):
        manager.decline(start.reason, views[0].disk.iteration)
    return start if max(each.offered for each in views) >= 0 else None


def _all_ranks(view: RankView) -> list[RankView]:
    from torch import distributed

    if not distributed.is_initialized():
        return [view]
    views: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(views, view)
    return views


def _disk_text(disk: DiskStart) -> str:
    return "nothing" if disk.iteration < 0 else f"iteration {disk.iteration}"
