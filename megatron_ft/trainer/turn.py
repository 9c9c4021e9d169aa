"""What a rank does at an iteration boundary, given the permit that it sees.  Pure."""

from __future__ import annotations

from enum import Enum, auto

from megatron_ft.arena.format import Permit
from megatron_ft.core.identity import SnapshotId


class Turn(Enum):
    """The answer of ``turn``."""

    WAIT = auto()
    """Nothing is due now."""
    CAPTURE = auto()
    """This boundary is the permitted one."""
    MISS = auto()
    """This rank cannot take the permitted snapshot, and says so."""
    REPEAT = auto()
    """What was permitted last is void: say again that nothing is written for it.

    The first word may have died with an SMP, and without it the slot is never free.
    """


def turn(
    permit: Permit | None,
    iteration: int,
    last: SnapshotId | None,
    *,
    busy: bool,
    declined: bool,
    went_back: bool,
) -> Turn:
    """What is due when ``iteration`` has ended and ``last`` was the snapshot answered for last.

    ``busy`` says that the copy thread has not finished an earlier capture.  ``declined`` that
    this rank started without the snapshot it was offered: the first permit of such a life was
    given for training that starts from it; later ones follow what trainers have finished.
    ``went_back`` that a later iteration had ended before this one did, as the script has loaded an
    older checkpoint: a permit from then is for an iteration that is far away now.
    """
    if permit is None:
        return Turn.WAIT
    if permit.snapshot == last:
        return Turn.REPEAT if permit.revoked else Turn.WAIT
    for_the_offer = declined and permit.snapshot.sequence == 1
    if permit.revoked or permit.iteration < iteration or for_the_offer:
        return Turn.MISS
    if permit.iteration > iteration:
        return Turn.MISS if went_back else Turn.WAIT
    return Turn.MISS if busy else Turn.CAPTURE
