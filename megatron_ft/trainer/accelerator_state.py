"""accelerate.Accelerator: its whole state in snapshots, by one object.

Accelerate's own checkpoints know neither the step nor the place in the data.  Here both are in the
snapshot, and so are its schedulers, registered objects and random states.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.trainer.manager import SnapshotManager, env_int
from megatron_ft.trainer.mapping import MappingState
from megatron_ft.trainer.prepared_loader import watch
from megatron_ft.trainer.resumable_loader import positions, registered, set_positions
from megatron_ft.trainer.start_choice import DiskStart, RankView, agree, supervisor_chose_disk
from megatron_ft.trainer.state import RngState
from megatron_ft.trainer.teardown import on_teardown

_STEP = "megatron_ft_step"


class InMemoryState:
    """The state of an ``accelerator`` in snapshots; make it behind ``accelerator.prepare``.

    Prepared loaders are then read as before, and continue where training stood.  Call ``resume``
    once, before the first batch, and ``save`` at the end of every iteration, when schedulers have
    stepped too.  With ``replicated`` each rank of DistributedDataParallel captures a part of what
    all ranks hold alike; set it to False where their weights differ.  ``leave_out`` are patterns as
    of SnapshotManager; models are called ``model0/...``.  ``manager`` is one of other settings than
    the environment's.

    ConfigError for a backend that snapshots cannot hold; NotUnderSupervisorError outside
    ``megatron-ft run``.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        replicated: bool = True,
        leave_out: Sequence[str] = (),
        manager: SnapshotManager | None = None,
    ) -> None:
        self._accelerator, self._replicated = accelerator, replicated
        self._leave_out = tuple(leave_out)
        self._connect(manager)
        self._prepared = [watch(loader) for loader in accelerator._dataloaders]

    def _connect(self, manager: SnapshotManager | None) -> None:
        if problem := unsupported(self._accelerator):
            raise ConfigError(f"InMemoryState: {problem}")
        self._manager = manager or SnapshotManager(SnapshotConfig.from_env())
        self._state: MappingState | None = None
        self._stepped = False
        self._progress = _Progress(self._accelerator)
        # So that checkpoints of save_state know the step and the place in the data, too.
        self._accelerator.register_for_checkpointing(self._progress)
        for optimizer in self._accelerator._optimizers:
            self._manager.register_fence(optimizer.optimizer)
            optimizer.step = self._noting(optimizer.step)

    def resume(self, checkpoint: str | None = None) -> int:
        """Restore, and return the step that training continues from.  Collective.

        It is that of memory, or of ``checkpoint``, a folder of ``accelerator.save_state``, if this
        is newer; 0 if there is neither.
        """
        self._state, self._held = self._complete(), self._known()
        offered, disk = self._manager.offered_iteration, DiskStart(self._step_in(checkpoint))
        start = agree(RankView(offered, disk, supervisor_chose_disk()), self._manager)
        if start is not None and start.from_memory:
            self._manager.load(into=self._state)
        elif checkpoint is not None:
            self._accelerator.load_state(checkpoint)
        number_saves(self._accelerator)
        return self._progress.step

    def save(self) -> None:
        """Take a snapshot at the end of an iteration, if one is due.

        A call while gradients accumulate, before the optimizer has stepped, does nothing.
        """
        if not self._stepped or not self._accelerator.sync_gradients:
            return
        if self._state is None or self._known() != self._held:
            raise ConfigError(
                "call InMemoryState.resume() at every start before training, and behind "
                "accelerator.prepare and register_for_checkpointing"
            )
        if problem := self._unready():
            raise ConfigError(f"InMemoryState.save: {problem}")
        self._stepped = False
        self._progress.step += 1
        self._manager.save(self._progress.step, self._state)

    def close(self, *, finished: bool | None = None) -> None:
        """Wait for a running capture, and leave the job; call it at the end of training.

        ``finished`` is whether the program's plan is done, as of ``SnapshotManager.close``.
        """
        self._manager.close(finished=finished)

    def _known(self) -> list[int]:
        one = self._accelerator
        return list(map(len, (one._optimizers, one._schedulers, one._custom_objects)))

    def _unready(self) -> str:
        """Reason why the place in the data is not known, '' if it is."""
        if not self._prepared and not positions():
            return (
                "accelerator.prepare was given no data loader: give it the loader, or read through "
                "megatron_ft.ResumableLoader(loader)"
            )
        if self._prepared and not any(position.is_read for position in self._prepared):
            return (
                "no prepared loader is being read. Read the one that accelerator.prepare returned; "
                "skip_first_batches makes another, and resume() takes its place"
            )
        if any(position.draws for position in self._prepared):
            return (
                "reading its data draws random numbers in the training process, and a restart "
                "would draw others: let the data set draw, from a generator seeded by the index"
            )
        return ""

    def _noting(self, step: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            # Also where the scaler has skipped it: the script counts that iteration as well.
            self._stepped |= self._accelerator.sync_gradients
            return result

        return noted

    def _complete(self) -> _AcceleratorMapping:
        one = self._accelerator
        found = {f"model{i}": model for i, model in enumerate(one._models)}
        found |= {f"optimizer{i}": each.optimizer for i, each in enumerate(one._optimizers)}
        shared = [*found] if self._replicated and not one.is_fsdp2 and one.use_distributed else []
        found |= {f"scheduler{i}": scheduler for i, scheduler in enumerate(one._schedulers)}
        custom = [each for each in one._custom_objects if each is not self._progress]
        found |= {f"object{i}": _AtBoundary(each) for i, each in enumerate(custom)}
        if one.scaler is not None:
            found["scaler"] = one.scaler
        found |= {"progress": self._progress, "rng": RngState()}
        group = torch.distributed.group.WORLD if shared else None
        return _AcceleratorMapping(
            found, replicated=dict.fromkeys(shared, group), leave_out=self._leave_out
        )

    def _step_in(self, checkpoint: str | None) -> int:
        """The step of a checkpoint, -1 if there is none, or if it was saved without this class."""
        index = self._accelerator._custom_objects.index(self._progress)
        file = Path(checkpoint or os.devnull, f"custom_checkpoint_{index}.pkl")
        state = torch.load(file, weights_only=True) if file.is_file() else {}
        return int(state.get(_STEP, -1))


class _Progress:
    """The step, Accelerate's own count of batches, and the places in the data."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self.step = accelerator, 0
        self._loaders = registered

    def state_dict(self) -> dict[str, Any]:
        return {_STEP: self.step, "batches": self._accelerator.step, "loaders": positions()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self._accelerator.step = state[_STEP], state["batches"]
        set_positions(state["loaders"])


class _AtBoundary:
    """A registered object; it may change at any time, so all of it is secured in ``save``."""

    def __init__(self, inner: Any) -> None:
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


class _AcceleratorMapping(MappingState):
    """The state of this rank, for the same number of ranks."""

    def expect_reshape(self) -> None:
        raise LayoutMismatchError(
            "the snapshot is of another number of ranks, by which Accelerate deals out its data "
            "and steps its schedulers: start with the old number of ranks"
        )


_UNSUPPORTED = {
    "DEEPSPEED": "of DeepSpeed takes InMemoryState of deepspeed_ext: import it from there",
    "FSDP": "of FSDP1 is not supported: use FullyShardedDataParallelPlugin(fsdp_version=2)",
    "MEGATRON_LM": "of the Megatron-LM plugin is not supported: train with Megatron-LM itself, "
    "which megatron-ft protects without changes",
}


def unsupported(accelerator: Any) -> str:
    """Reason why snapshots cannot hold an Accelerator's state, and a remedy; '' if they can."""
    kind = accelerator.distributed_type.value
    if kind == "NO" and env_int("WORLD_SIZE", 1) > 1:
        return (
            "Accelerate takes each rank for a job of its own, because it found no device for it: "
            "on CPUs set Accelerator(cpu=True) or ACCELERATE_USE_CPU=true"
        )
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") and not accelerator.is_fsdp2:
        other = "is not supported: use SnapshotManager with the random states of its devices"
        return f"an Accelerator {_UNSUPPORTED.get(kind, f'of {kind} {other}')}"
    mesh = accelerator.parallelism_config
    if mesh is not None and mesh.non_data_parallel_size > 1:
        return "tensor, context and sequence parallelism are not supported: set their sizes to 1"
    if accelerator.has_lomo_optimizer:
        return "LOMO changes weights in the backward pass: use an optimizer that does so in step()"
    if not accelerator._models or not accelerator._optimizers:
        return "make it behind accelerator.prepare(model, optimizer, loader, ...)"
    return ""


def number_saves(accelerator: Any) -> None:
    """Number the next automatic checkpoint after those that exist: save_state refuses those."""
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and config.project_dir:
        found = Path(config.project_dir, "checkpoints").glob("checkpoint_*")
        numbers = [int(path.name.rpartition("_")[2]) for path in found]
        config.iteration = max([config.iteration, *(each + 1 for each in numbers)])


def _forget() -> None:
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


on_teardown(_forget)
