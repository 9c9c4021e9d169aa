"""What a rank runs to tell what a capture costs; writes its findings as JSON."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn

from megatron_ft.config import SnapshotConfig
from megatron_ft.trainer.copier import PIECE_BYTES
from megatron_ft.trainer.cpu import CpuCopier
from megatron_ft.trainer.manager import SnapshotManager
from megatron_ft.trainer.state import RngState, live_tensors
from tests.programs.deepspeed_program import make_engine, train_step
from tests.support.captures import FakeSmp
from tests.support.deepspeed_cells import Cell, zero

ROUNDS, WIDTH = 25, 4608


class Wide(nn.Module):
    """Large enough that copies take longer than what is around them: 255 MB of state a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = torch.ones(2, WIDTH, dtype=self.weight.weight.dtype) * targets.float().mean()
        return self.weight(inputs.to(self.weight.weight.dtype)).float().square().mean()


def wide(options: dict[str, Any]) -> dict[str, Any]:
    model = Wide()
    return {"model": model, "model_parameters": list(model.parameters())}


def measure() -> None:
    """Processor time of captures and of one memcpy of as many bytes, taken in turns."""
    from deepspeed_ext.state import EngineState

    cell = Cell("overhead", 2, zero(2, "bf16"), model="tests.programs.deepspeed_overhead:wide")
    engine = make_engine(dataclasses.asdict(cell))
    rank, folder = distributed.get_rank(), Path(sys.argv[1], f"rank{distributed.get_rank()}")
    folder.mkdir()
    smp = FakeSmp(folder, block_bytes=1 << 20)
    config = SnapshotConfig()
    copier = TimedCopier(PIECE_BYTES)
    manager = SnapshotManager(config, shard_id=smp.shard_id, client=smp, copier=copier)  # type: ignore[arg-type]
    state = EngineState(engine, {"random": RngState()})
    manager.prepare(state)
    for inner in [state.inner_optimizer]:
        manager.register_fence(inner)
    size = sum(t.nbytes for t in live_tensors(state).values())
    plain = PlainCopy(folder / "plain", size, PIECE_BYTES)
    found: dict[str, Any] = {"capture": [], "memcpy": [], "calls": []}
    train_step(engine)
    for turn in range(distributed.get_world_size()):
        distributed.barrier()  # one rank at a time: both cores for whoever is measured
        if turn == rank:
            _take_turns(found, smp, manager, state, copier, plain)
    found["bytes"] = {
        "captured": manager.stats.copied_bytes // manager.stats.taken,
        "memcpy": plain.size,
    }
    found["taken"] = manager.stats.taken
    manager.close()
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
    engine.destroy()
    distributed.destroy_process_group()


def _take_turns(
    found: dict[str, Any],
    smp: FakeSmp,
    manager: SnapshotManager,
    state: Any,
    copier: TimedCopier,
    plain: PlainCopy,
) -> None:
    """Capture and copy by turns, so that what slows this machine down meets both."""
    for at in range(ROUNDS):
        smp.grant(at, slot=at % 2)
        with counted(found["calls"]):
            held = _hold(manager, at, state)
        smp.wait_ended()
        found["capture"].append(held + copier.seconds)
        found["memcpy"].append(plain.copy())


def _hold(manager: SnapshotManager, at: int, state: Any) -> float:
    """Processor seconds of training from the end of an iteration until the optimizer may step."""
    started = time.thread_time()
    manager.save(at, state)
    with manager.fence():
        return time.thread_time() - started


class TimedCopier(CpuCopier):
    """Tells the processor seconds of its last copy: time waited for a core is not the copy's."""

    seconds = 0.0

    def copy(self, *arguments: Any) -> bool:
        started = time.thread_time()
        done = super().copy(*arguments)
        self.seconds = time.thread_time() - started
        return done


class PlainCopy:
    """A memcpy of ``size`` bytes into prefaulted shared memory, in pieces that could be stopped.

    libc copies tens of MiB in one call by other instructions than less, and a capture makes no
    such calls: it asks between pieces whether it has to stop.
    """

    def __init__(self, path: Path, size: int, piece: int) -> None:
        self.size, self._piece = size, piece
        self._source = torch.ones(size, dtype=torch.uint8)
        with path.open("w+b") as file:
            file.truncate(size)
            self._target = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        self._target.fill_(1)

    def copy(self) -> float:
        """Processor seconds that it took."""
        target, source = self._target.data_ptr(), self._source.data_ptr()
        started = time.thread_time()
        for at in range(0, self.size, self._piece):
            ctypes.memmove(target + at, source + at, min(self._piece, self.size - at))
        return time.thread_time() - started


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Note which state dicts are built, and how many collectives any group is asked for."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    before = _collectives()
    owners: tuple[Any, ...] = (nn.Module, torch.optim.Optimizer, DeepSpeedZeroOptimizer)
    names = [(owner, "state_dict") for owner in owners]
    names.append((DeepSpeedEngine, "module_state_dict"))
    originals = [(owner, name, getattr(owner, name)) for owner, name in names]
    for owner, name, original in originals:
        setattr(owner, name, _noting(original, calls))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    calls += [f"{after - before[g]} collectives" for g, after in _collectives().items()]


def _noting(original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **keywords: Any) -> Any:
        calls.append(original.__qualname__)
        return original(*args, **keywords)

    return noting


def _collectives() -> dict[str, int]:
    """How many every process group has been asked for, by its name."""
    groups = distributed.distributed_c10d._world.pg_names.items()
    return {name: cast(Any, group)._get_sequence_number_for_group() for group, name in groups}
