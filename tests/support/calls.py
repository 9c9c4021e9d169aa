"""Counts calls of Python and of a library in one save()."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.manager import SnapshotManager
from tests.support.captures import WAIT, FakeSmp, make_manager

BLOCK, PIECE = 65536, 1 << 20


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """Calls that this thread makes, of functions in Python ("call") and in C ("c_call")."""
    found: Counter[str] = Counter()
    gc.disable()
    sys.setprofile(lambda frame, event, what: found.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def saved(manager: SnapshotManager, smp: FakeSmp, state: dict[str, torch.Tensor], at: int) -> None:
    smp.grant(at)
    assert manager.save(at, state).captured.result(WAIT)
    smp.wait_ended()


def ready(smp: FakeSmp, state: dict[str, torch.Tensor]) -> SnapshotManager:
    """A manager that has captured the state twice, behind a fence: what can be cached is."""
    manager = make_manager(smp, copier=CpuCopier(PIECE))
    manager.prepare(state)
    with manager.fence():
        pass
    for iteration in (1, 2):
        saved(manager, smp, state, iteration)
    return manager


def calls_of_save(
    folder: Path, state: dict[str, Any], train: Callable[[], object] = lambda: None
) -> Counter[str]:
    """Of one behind two others; ``train`` comes before it."""
    folder.mkdir()
    smp = FakeSmp(folder, block_bytes=BLOCK)
    manager = ready(smp, state)
    train()
    smp.grant(3)
    found = calls_of(lambda: manager.save(3, state))
    smp.wait_ended()
    manager.close()
    assert smp.arena is not None and len(smp.sealed_records) == 3
    smp.arena.close()
    return found
