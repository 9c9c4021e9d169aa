"""Snapshots over one training run of a rank: from Megatron's set-up to the end of its loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_ft.checkpoint import native as start
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.identity import shard_id
from megatron_ft.megatron import fewer_ranks, own_checkpoints
from megatron_ft.megatron.optimizer import optimizer_parts
from megatron_ft.megatron.state import MegatronState
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.start_choice import WISH, RankView, agree, supervisor_chose_disk

_DISK_SOURCES = ("load", "pretrained_checkpoint")


@contextmanager
def without_disk_load(args: Any) -> Iterator[None]:
    """Keep Megatron's set-up from loading a checkpoint; its arguments are restored after."""
    given = {name: getattr(args, name, None) for name in _DISK_SOURCES}
    for name in _DISK_SOURCES:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


def place_of_rank() -> dict[str, Any]:
    """This rank's place in Megatron's parallel groups, as keywords of SnapshotManager.

    Pipeline, tensor and data-parallel rank (context parallelism counts as data parallel)
    name a rank uniquely, with experts too.  ``coordinates`` leave out the data-parallel
    one and keep the experts', so that stripes are made of ranks with shards of one size.
    """
    import torch
    from megatron.core import mpu

    pp, tp = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    dp = mpu.get_data_parallel_rank(with_context_parallel=True)
    ep = mpu.get_expert_model_parallel_rank()
    return {
        "shard_id": shard_id(pp=pp, tp=tp, dp=dp, ep=ep),
        "rank": torch.distributed.get_rank(),
        "coordinates": (pp, tp, ep),
    }


def make_manager(config: SnapshotConfig) -> SnapshotManager:
    """The manager of this rank, named by its place in Megatron's parallel groups.

    Raises NotUnderSupervisorError outside ``megatron-ft run``.
    """
    from megatron.training import get_args

    return SnapshotManager(config, **place_of_rank(), rank_rule=fewer_ranks.rule_of(get_args()))


class SnapshotRun:
    """One run: restores at its start, captures at iteration ends, fences the optimizer.

    Holds the model and optimizer through its state, so it must be closed with the run;
    :mod:`megatron_ft.megatron.hooks` does.
    """

    def __init__(self, args: Any, manager: SnapshotManager) -> None:
        self._args, self._manager = args, manager
        self._state: MegatronState | None = None
        self._from_memory, self._reached = False, -1

    def starts_from_memory(self) -> bool:
        """Decide with all other ranks whether to load the snapshot that was offered.

        Collective, once, before Megatron builds its model.
        """
        offered, disk = self._manager.offered_iteration, start.disk_of(self._args)
        changed = False
        if offered >= 0 and disk.asked:
            wish = start.wish_of(self._args)
            # A snapshot of another layout shows its objects only when it is loaded.
            objects = self._manager.offered_objects()
            changed = bool(objects) and objects.get(WISH) != wish
        view = RankView(offered, disk, supervisor_chose_disk(), changed)
        decision = agree(view, self._manager)
        if decision is not None:
            source = "memory" if decision.from_memory else "disk"
            _print_rank_0(f" starting from {source}: {decision.reason}")
        self._from_memory = decision is not None and decision.from_memory
        return self._from_memory

    def attach(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Take over what Megatron has built: restore into it, get an arena, guard its steps.

        Collective: all ranks have to come here.
        """
        self._state = MegatronState(model, optimizer, scheduler, self._args)
        if self._from_memory:
            started = time.perf_counter()
            iteration = self._manager.load(into=self._state)
            seconds = time.perf_counter() - started
            _print_rank_0(
                f"  successfully restored the in-memory snapshot {_place()} at iteration "
                f"{iteration} in {seconds:.2f} seconds; no checkpoint was read"
            )
        else:
            _print_rank_0(f" no in-memory snapshot restored: at iteration {self._args.iteration}")
        self._manager.prepare(self._state)
        for part in optimizer_parts(optimizer):
            # The inner one: it steps last, and not at all in an fp16 iteration that is skipped.
            self._manager.register_fence(part.optimizer)

    def begin_training(self, training: Mapping[str, Any]) -> None:
        """Megatron has built its data iterators and enters its loop with these arguments.

        ConfigError if a loader of the user's own cannot say where it stands.
        """
        assert self._state is not None, "attach comes first"
        self._state.training_begins(training["train_data_iterator"])
        self._reached = self._args.iteration
        if self._from_memory and own_checkpoints.is_missed(self._args):
            _print_rank_0(f" the checkpoint of iteration {self._args.iteration} was not finished")
            with self.pause():
                own_checkpoints.save_missed(self._args, training)

    def end_iteration(self, iteration: int, operations: float, data_iterator: Any) -> None:
        """All state of ``iteration`` is final: capture it if a snapshot is due."""
        assert self._state is not None, "attach comes first"
        self._reached = iteration
        self._state.at(iteration, operations, data_iterator)
        self._manager.save(iteration, self._state)

    def pause(self) -> AbstractContextManager[None]:
        return self._manager.watch.pause()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Lets captured tensors move inside: no copy reads them, nothing keeps their memory."""
        with self._manager.fence(), self.pause():
            self._manager.forget_tensors()
            yield

    def end_training(self, reached: int = -1) -> None:
        """Megatron has left its loop without an error, perhaps before its last iteration.

        ``reached`` is the last iteration that it knows: those that it skips come to no hook.
        """
        last = max(reached, self._reached)
        self._manager.say_end(finished=last >= self._args.train_iters)

    def close(self) -> None:
        self._state = None
        self._manager.close()


def _place() -> str:
    from megatron.core import mpu

    tp, pp = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    tps = mpu.get_tensor_model_parallel_world_size()
    pps = mpu.get_pipeline_model_parallel_world_size()
    return f"[ t {tp + 1}/{tps}, p {pp + 1}/{pps} ]"


def _print_rank_0(message: str) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(message)
