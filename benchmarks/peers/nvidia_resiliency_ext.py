"""nvidia-resiliency-ext's local checkpoints, with a full copy at the other rank."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods import State
from benchmarks.peers.peer import Peer, copy_into

LOCAL = "nvidia_resiliency_ext.checkpointing.local"
QUEUE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"


class AsyncReplicated(Peer):
    """LocalCheckpointManager.save(is_async=True), CliqueReplicationStrategy, as documented."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        managers = import_module(f"{LOCAL}.ckpt_managers.local_manager")
        strategies = import_module(f"{LOCAL}.replication.strategies")
        pair = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
        self._manager: Any = managers.LocalCheckpointManager(folder / "local", repl_strategy=pair)
        self._queue: Any = import_module(QUEUE).AsyncCallsQueue(persistent=False)
        self._wrapped: Any = import_module("benchmarks.peers.nvidia_state").CpuState

    def save(self, iteration: int, state: State) -> bool:
        """Exchange copies, then write in a fork."""
        self.settle()
        request = self._manager.save(self._wrapped(state), iteration, is_async=True)
        self._queue.schedule_async_request(request)
        return True

    def settle(self) -> None:
        """Wait for the files, and remove the older ones."""
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def load(self, state: State) -> None:
        """Agree on the newest and read one's own file."""
        self._manager.find_latest()
        found, _ = self._manager.load()
        copy_into(state, found.state)


class AsyncReplicatedOnCpu(AsyncReplicated):
    """The same with the one CUDA call on its way, a wait for the device, left out."""

    def __init__(self, folder: Path) -> None:
        torch.cuda.synchronize = _no_device
        super().__init__(folder)


def _no_device(device: object = None) -> None:
    """Nothing runs on a device."""


class Replicated(AsyncReplicated):
    """LocalCheckpointManager.save(is_async=False) with the same copies."""

    def save(self, iteration: int, state: State) -> bool:
        """Exchange copies and write."""
        self._manager.save(self._wrapped(state), iteration, is_async=False)
        return True

    def settle(self) -> None:
        """It is safe when the call returns."""
