"""The demo's training program without a supervisor, for tests of Megatron's state.

Two managers: one keeps files and is worse than the real one on purpose, as it copies lazily
captured tensors at the last moment that the contract allows, in the fence; the other is the
real one, on an arena that the test itself grants.  Both poison everything before they load,
so a tensor that is not restored shows up in the comparison.
"""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron_ft.config import SnapshotConfig
from megatron_ft.testing import cpu_device

SAVE_AT, SAVE_TO, LOAD_FROM = "TEST_SAVE_AT", "TEST_SAVE_TO", "TEST_LOAD_FROM"
USE_ARENA = "TEST_USE_ARENA"


def _poison(state: Any) -> None:
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        for chunk in state._model:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))


class FileManager:
    """SnapshotManager's methods; one file per rank, replicated tensors split over ranks."""

    def __init__(self) -> None:
        self._rank = torch.distributed.get_rank()
        self._saved: dict[str, Any] | None = None
        self._pending: Any = None
        self.has_snapshot = LOAD_FROM in os.environ

    def _part(self, state: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        group = state.replicas().get(name)
        if group is None:
            return tensor.clone()
        ranks = torch.distributed.get_world_size(group)
        return tensor.view(-1).tensor_split(ranks)[torch.distributed.get_rank(group)].clone()

    def load(self, into: Any) -> int:
        _poison(into)
        directory = Path(os.environ[LOAD_FROM])
        files = [
            pickle.loads((directory / f"{rank}.pickle").read_bytes())
            for rank in range(torch.distributed.get_world_size())
        ]
        replicas = into.replicas()
        live = {**into.tensors(), **into.boundary_tensors()}
        assert live.keys() == files[self._rank]["tensors"].keys()
        for name, tensor in live.items():
            if name in replicas:
                ranks = torch.distributed.get_process_group_ranks(replicas[name])
                parts = [files[rank]["tensors"][name] for rank in ranks]
                tensor.copy_(torch.cat(parts).view(tensor.shape))
            else:
                tensor.copy_(files[self._rank]["tensors"][name])
        into.load(files[self._rank]["objects"])
        return int(files[self._rank]["objects"]["iteration"])

    def prepare(self, state: Any) -> None:
        assert state.tensors()

    def save(self, iteration: int, state: Any) -> None:
        if iteration != int(os.environ.get(SAVE_AT, "-1")):
            return
        boundary = {name: tensor.clone() for name, tensor in state.boundary_tensors().items()}
        self._saved = {"tensors": boundary, "objects": pickle.dumps(state.objects())}
        self._pending = state

    def register_fence(self, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def fence(self) -> None:
        if self._saved is not None and self._pending is not None:
            state, self._pending = self._pending, None
            for name, tensor in state.tensors().items():
                self._saved["tensors"][name] = self._part(state, name, tensor)

    def close(self) -> None:
        if self._saved is None:
            return
        self.fence()
        saved = {**self._saved, "objects": pickle.loads(self._saved["objects"])}
        directory = Path(os.environ[SAVE_TO])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self._rank}.pickle").write_bytes(pickle.dumps(saved))


def make_arena_manager(config: SnapshotConfig) -> Any:
    """The real manager, with a client that grants one capture and offers it to the next run."""
    from megatron.core import mpu
    from test_capture_support import FakeSmp, Offer

    from megatron_ft.capture.manager import SnapshotManager

    rank = torch.distributed.get_rank()
    directory = Path(os.environ[SAVE_TO])
    directory.mkdir(parents=True, exist_ok=True)
    smp = FakeSmp(directory, shard_id=f"pp0-tp0-dp{rank}-ep0")
    if LOAD_FROM in os.environ:
        record = pickle.loads((Path(os.environ[LOAD_FROM]) / f"{rank}.record").read_bytes())
        smp.offer = Offer(Path(os.environ[LOAD_FROM]) / f"{smp.shard_id}.arena", 0, record)

    class ArenaManager(SnapshotManager):
        def load(self, into: Any) -> int:
            _poison(into)
            return super().load(into)

        def prepare(self, state: Any) -> None:
            super().prepare(state)
            if SAVE_AT in os.environ:
                smp.grant(int(os.environ[SAVE_AT]))

        def close(self) -> None:
            super().close()
            assert not smp.abandoned_ids and not smp.missed_ids
            for record in smp.sealed_records.values():
                (directory / f"{rank}.record").write_bytes(pickle.dumps(record))

    assert mpu.get_data_parallel_rank() == rank, "only for purely data-parallel layouts"
    return ArenaManager(config, shard_id=smp.shard_id, client=smp)


def main() -> None:
    cpu_device.install()
    # Let data loaders draw from the generator of dropout again: a restore must not need
    # the stand-in's help against that.
    loader: Any = DataLoader
    loader.__iter__ = loader.__iter__.__wrapped__
    from megatron_ft.megatron import install
    from megatron_ft.testing import pretrain_gpt

    use_arena = bool(os.environ.get(USE_ARENA))
    install(make_arena_manager if use_arena else lambda config: FileManager())
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
