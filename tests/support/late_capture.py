"""A rank of a test, with an SMP that the test plays.

The snapshot manager is the real one and so are the arenas.  Two things are worse than in a
real job, on purpose: lazily copied tensors are copied at the last moment that the contract
allows, in the fence, and everything is poisoned before it is loaded, so that a tensor that
is not captured, or captured too late, shows up in the comparison.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import RankRule
from megatron_ft.erasure.stripes import RankPlace
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.client import RestoreOffer
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.state import live_tensors
from tests.support.arena_folder import (
    SLOT,
    arena_path,
    header_of,
    open_arenas,
    plan,
    read_record,
    record_path,
    replicas_path,
)
from tests.support.captures import FakeSmp

SAVE_AT, SAVE_TO, LOAD_FROM = "TEST_SAVE_AT", "TEST_SAVE_TO", "TEST_LOAD_FROM"
SCHEME, RANKS_PER_NODE = "TEST_SCHEME", "TEST_RANKS_PER_NODE"
RESHAPE_FROM = "TEST_RESHAPE_FROM"
"""A folder of arenas of another layout."""
NO_OFFER = "TEST_NO_OFFER"
"""The rank that is offered nothing, if one is to be."""


FENCE_SECONDS = 100.0
"""Training may save a checkpoint on its way; less than a run may take, so that this is told."""


class ArenaClient(FakeSmp):
    """Plans stripes with the other ranks and makes this rank's arena in a common folder."""

    def __init__(self, place: dict[str, Any]) -> None:
        folder = Path(os.environ[SAVE_TO])
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, place["shard_id"])
        self._place = place
        if LOAD_FROM in os.environ and os.environ.get(NO_OFFER) != str(place["rank"]):
            source = Path(os.environ[LOAD_FROM])
            record = read_record(source, self.shard_id)
            self.offer = RestoreOffer(arena_path(source, self.shard_id), SLOT, record, "memory")

    def prepare(
        self,
        required_bytes: int,
        interval: int,
        timeout: float = 0.0,
        rank_rule: RankRule | None = None,
    ) -> m.Prepared:
        """Agree with all ranks on the stripes, then make the arena."""
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, self._rank_place(required_bytes))
        stripes = plan(every, os.environ.get(SCHEME, "none"))
        if torch.distributed.get_rank() == 0:
            (self.directory / "stripes").write_bytes(pickle.dumps(stripes))
        self.arena = Arena.create(self.path, header_of(self.shard_id, stripes))
        return m.Prepared(str(self.path))

    def _rank_place(self, required_bytes: int) -> RankPlace:
        rank, per_node = self._place["rank"], int(os.environ.get(RANKS_PER_NODE, "1"))
        node = f"node{rank // per_node}"
        place = (rank, self.shard_id, node, node, rank % per_node, self._place["coordinates"])
        return RankPlace(*place, required_bytes)

    def close(self) -> None:
        assert not self.abandoned_ids and not self.missed_ids and not self.unfit_errors
        for record in self.sealed_records.values():
            record_path(self.directory, self.shard_id).write_bytes(pickle.dumps(record))
            digests = self.replicas[record.snapshot]
            replicas_path(self.directory, self.shard_id).write_bytes(pickle.dumps(digests))


class LateCopier(CpuCopier):
    """Copies nothing before training has come to a fence, or ends."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.fence_reached = Event()

    def copy(self, *arguments: Any) -> bool:
        assert self.fence_reached.wait(FENCE_SECONDS), "training never came to a fence"
        return super().copy(*arguments)


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite these, and the generators: all that a restore has to bring back."""
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    overwrite(tensors)


def overwrite(tensors: Iterable[torch.Tensor]) -> None:
    """Make nothing of what these hold useful."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else True)


class ArenaManager(SnapshotManager):
    """The real manager with the client and the copier above.

    ``weights`` gives the model's weights of a state, which a restore has to bring back
    whether they were captured or not.
    """

    def __init__(
        self,
        config: SnapshotConfig,
        place: dict[str, Any],
        weights: Callable[[Any], Iterable[torch.Tensor]],
    ) -> None:
        self._arenas, self._late, self._of = ArenaClient(place), LateCopier(), weights
        client: Any = self._arenas
        super().__init__(config, client=client, copier=self._late, **place)
        self._wait_unfenced = self._captures._wait_unfenced
        self._captures._wait_unfenced = self._let_copy_and_wait  # type: ignore[method-assign]

    def load(self, into: Any) -> int:
        if self.offered_iteration >= 0:
            self._poison(into)
        return super().load(into)

    def _poison(self, into: Any) -> None:
        poison(live_tensors(self._adapt(into)).values())
        poison(self._of(into))

    def decline(self, reason: str = "late", iteration: int = -1) -> None:
        super().decline(reason, iteration)
        self._arenas.sequence = (
            1  # the first permit of an incarnation would be for what was declined
        )

    def prepare(self, state: Any) -> None:
        super().prepare(state)
        if SAVE_AT in os.environ:
            self._arenas.grant(int(os.environ[SAVE_AT]))
        else:
            self._late.fence_reached.set()

    def register_fence(self, optimizer: Any) -> Any:
        optimizer.register_step_pre_hook(lambda *_: self._let_copy())
        return super().register_fence(optimizer)

    def fence(self) -> Any:
        self._let_copy()
        return super().fence()

    def _let_copy(self) -> None:
        if self._captures._run is not None:
            self._late.fence_reached.set()

    def _let_copy_and_wait(self, run: Any) -> None:
        # Every step before the snapshot was skipped, so no fence has been seen.
        self._late.fence_reached.set()
        self._wait_unfenced(run)

    def close(self, *, finished: bool | None = None, at_once: bool = False) -> None:
        self._late.fence_reached.set()
        super().close(finished=finished, at_once=at_once)


class ReshapingManager(ArenaManager):
    """Restores from the arenas of a job with another layout, each rank by itself."""

    @property
    def offered_iteration(self) -> int:
        with ExitStack() as stack:
            return self._old(stack).info.iteration

    def offered_objects(self) -> dict[str, Any]:
        return {}

    def load(self, into: Any) -> int:
        # It imports this module.
        from tests.support.reshaping import reshape_into

        # Not the generators: a rank may have to keep what they were seeded with.
        overwrite(self._of(into))
        with ExitStack() as stack:
            old = self._old(stack)
            compared = reshape_into(self._adapt(into), old, self.shard_id)
            print(f"reshaped {compared} tensors with a place", flush=True)
            return old.info.iteration

    def _old(self, stack: ExitStack) -> OpenSnapshot:
        return open_arenas(Path(os.environ[RESHAPE_FROM]), stack)
