"""Snapshots that a recovery must not use: those that training fails from, and rewound ones.  Pure.

A snapshot can be whole and still be bad: weights that have gone wrong before it was
taken.  Training that starts from it fails again and again.  So failures soon after a
restore are held against the snapshot; after the second it is not used a third time.
"""

from __future__ import annotations

import msgspec

from megatron_ft.core.identity import SnapshotId

FAILURE_LIMIT = 2
MOST_REJECTED = 64
"""Older ones are off the lineage by then, as each recovery starts from another snapshot."""


class Suspicion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often training has failed soon after it had started from a snapshot."""

    snapshot: SnapshotId
    failures: int


class Quarantine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job remembers of bad snapshots, over all its incarnations and supervisors.

    ``before`` is an iteration to which the user has asked to rewind and which no recovery
    has carried out yet.  With ``over_disk`` memory, and what was drained of it, goes before the
    training framework's own checkpoints even where those are newer: they are of what was given up,
    until the newest is named (checkpoint.native.naming) in another way than ``named``, None if not
    known.
    ``own`` is how one of those was named that is not used, come what may.
    """

    suspects: tuple[Suspicion, ...] = ()
    rejected: tuple[SnapshotId, ...] = ()
    before: int | None = None
    over_disk: bool = False
    own: str = ""
    named: str | None = None

    def after_failure(self, started_from: SnapshotId, gained: int, near: int) -> Quarantine:
        """Training that had started from a snapshot has failed after ``gained`` iterations.

        Further away than ``near`` iterations it clears the snapshot of earlier suspicions;
        with ``near`` 0 nothing is ever suspected.  A rejected snapshot stays rejected, once.
        """
        others = tuple(s for s in self.suspects if s.snapshot != started_from)
        if gained > near or near <= 0:
            return msgspec.structs.replace(self, suspects=others)
        failures = 1 + self.failures(started_from)
        known = started_from in self.rejected
        if failures < FAILURE_LIMIT and not known:
            now = (*others, Suspicion(started_from, failures))[-MOST_REJECTED:]
            return msgspec.structs.replace(self, suspects=now)
        added = () if known else (started_from,)
        rejected = (*self.rejected, *added)[-MOST_REJECTED:]
        return msgspec.structs.replace(
            self, suspects=others, rejected=rejected, over_disk=True, named=None
        )

    def failures(self, snapshot: SnapshotId) -> int:
        """How often training has failed soon after a start from ``snapshot``, if not rejected."""
        return next((s.failures for s in self.suspects if s.snapshot == snapshot), 0)

    def rewound(self, before: int) -> Quarantine:
        """The user wants nothing of iteration ``before`` or later; an earlier wish still holds."""
        least = before if self.before is None else min(before, self.before)
        return msgspec.structs.replace(self, before=least, over_disk=True, named=None)

    def giving_up(self, own: str) -> Quarantine:
        """The framework's own checkpoint that is named so is given up; '' for none."""
        return msgspec.structs.replace(self, own=own or self.own)

    def settled(self, named: str | None = None) -> Quarantine:
        """A recovery has carried the rewind out: its lineage leaves out what is to be left out.

        ``named`` is how the framework's newest checkpoint was named then, None if not known.
        """
        known = named if self.over_disk and self.named is None else self.named
        return msgspec.structs.replace(self, before=None, named=known)

    def goes_before(self, named: str | None) -> bool:
        """Whether memory goes before a newer checkpoint of the framework's own, so named.

        One that is named since the last rollback is of what has been done since.
        """
        return self.over_disk and (named in (None, "", self.named) or self.named is None)

    def reason_against(self, snapshot: SnapshotId, iteration: int) -> str:
        """Why a snapshot, in memory or on disk, must not be used; empty if it may."""
        if snapshot in self.rejected:
            return f"training failed {FAILURE_LIMIT} times soon after a start from it"
        return self.reason_against_iteration(iteration)

    def reason_against_iteration(self, iteration: int) -> str:
        """The same where only the iteration is known: of the framework's own checkpoints."""
        if self.before is not None and iteration >= self.before:
            return f"the job is to be rewound to before iteration {self.before}"
        return ""
