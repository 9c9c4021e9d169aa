"""The choice where training starts from, before there is an engine.

Clients that count steps and skip data before they make their engine have to know then.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from deepspeed_ext import client_state
from deepspeed_ext.saving import Checkpoints
from megatron_ft.trainer.start_choice import (
    DiskStart,
    RankView,
    StartDecision,
    agree,
    supervisor_chose_disk,
)

if TYPE_CHECKING:
    from megatron_ft.trainer.manager import SnapshotManager


class EarlyStart:
    """One decision of all ranks, for the next engine of this process.

    ``place`` is that of the rank, as of attachment.place_of; ``objects`` are the small objects of
    the offered snapshot.
    """

    waiting: ClassVar[EarlyStart | None] = None

    def __init__(self, manager: SnapshotManager, place: Mapping[str, Any]) -> None:
        self.manager, self.place = manager, place
        self.objects = manager.offered_objects()
        self.from_memory = False
        # Of an engine it asks for this alone.
        self.checkpoints = Checkpoints(SimpleNamespace(load_universal_checkpoint=lambda: False))
        EarlyStart.waiting = self

    @classmethod
    def take(cls) -> EarlyStart | None:
        """The decision that no engine has taken yet, once."""
        waiting, EarlyStart.waiting = EarlyStart.waiting, None
        return waiting

    def entries(self, client: str) -> Mapping[str, Any]:
        """The state that an adapter gave to the offered snapshot; {} if another did, or none."""
        found = (self.objects.get(client_state.NAME) or {}).get("entries") or {}
        return found if found.get(client_state.CLIENT) == client else {}

    def decide(self, client: str, load_dir: str | None, problem: str = "") -> bool:
        """Decide whether memory serves in the place of the checkpoint in ``load_dir``.  Collective.

        ``problem`` says why this rank cannot use the snapshot.
        """
        offered, disk, is_new = self.manager.offered_iteration, DiskStart(-1), False
        if load_dir is not None:
            disk, is_new = self.checkpoints.find(load_dir, None, offered, self.objects)
        if offered >= 0 and not self.entries(client):
            problem = f"the snapshot does not hold the state of {client}"
        state = self.objects.get(client_state.NAME) or {}
        problem = str(state.get("refused") or problem)
        view = RankView(offered, disk, supervisor_chose_disk(), is_new, problem)
        start = agree(view, self.manager)
        if start is not None and self.place["rank"] == 0:
            print(f"[megatron-ft] {announcement(start, offered, disk)}", flush=True)
        self.from_memory = start is not None and start.from_memory
        return self.from_memory


def announcement(start: StartDecision, offered: int, disk: DiskStart) -> str:
    """A sentence for the user about a decision; ``offered`` is the step of the snapshot."""
    if start.from_memory or disk.iteration >= 0:
        return f"starting from {'memory' if start.from_memory else 'disk'}: {start.reason}"
    return (
        f"warning: starting from scratch, not from the snapshot of step {offered}: {start.reason}"
    )
