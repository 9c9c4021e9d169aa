"""The complete training state of a rank at its end, and the comparison of two runs by it.

Written independently of the snapshot code on purpose: trainings save *everything*, weights that
a snapshot would derive included, so that a comparison finds what a snapshot forgot.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ft.cli.chaos.trace import TraceLine, final_lines, final_path, read_trace


def plain(value: Any) -> Any:
    """A copy in which everything is a host tensor, a container, a number, a text or a repr.

    A file of it loads with ``torch.load(..., weights_only=True)``.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)


def random_states(device: Any, tracker: Any) -> dict[str, Any]:
    return {
        "python": plain(random.getstate()),
        "numpy": plain(np.random.get_state()),
        "torch": plain(torch.get_rng_state()),
        "device": plain(device),
        "tracker": plain(tracker),
    }


def write(path: Path, state: dict[str, Any]) -> None:
    """Save ``state`` under ``path``; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".half")
    torch.save(state, half)
    os.replace(half, path)


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Paths at which two plain states differ in type, shape, keys or any bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        same = same and torch.equal(_bits(left), _bits(right))
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [d for k in left for d in differences(left[k], right[k], f"{where}/{k}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, f"{where}/{n}")]
    return [] if type(left) is type(right) and left == right else [where]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, because NaN differs from itself and -0.0 equals 0.0.
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)


@dataclass
class Comparison:
    """Counts of what was compared, and where it differs.

    ``deviation`` is the largest relative difference of losses that need not be the same bit by bit.
    """

    losses: int = 0
    samples: int = 0
    tensors: int = 0
    values: int = 0
    bytes: int = 0
    deviation: float = 0.0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not self.differences and self.tensors > 0 and self.losses > 0


def compare_runs(ours: Path, oracle: Path, world_size: int, iterations: int) -> Comparison:
    """Compare trace and final state of every rank in two trace folders.

    The last occurrence of an iteration counts; each of 1 to ``iterations`` must be there.
    """
    result = Comparison()
    for rank in range(world_size):
        compare_traces(result, rank, ours, oracle, iterations)
        compare_states(result, rank, ours, oracle)
    return result


def compare_traces(
    result: Comparison, rank: int, ours: Path, oracle: Path, iterations: int
) -> None:
    mine, other = (final_lines(read_trace(folder, rank)) for folder in (ours, oracle))
    for iteration in range(1, iterations + 1):
        where = f"rank {rank} iteration {iteration}"
        _compare_lines(result, where, mine.get(iteration), other.get(iteration))


def _compare_lines(
    result: Comparison, where: str, mine: TraceLine | None, other: TraceLine | None
) -> None:
    found = result.differences
    if mine is None or other is None:
        run = "our run" if mine is None else "the uninterrupted run"
        found.append(f"{where}: missing in {run}")
        return
    if mine.loss != other.loss:
        found.append(f"{where}: loss {mine.loss_value!r}, uninterrupted {other.loss_value!r}")
    if mine.samples != other.samples:
        found.append(f"{where}: samples {mine.samples}, uninterrupted {other.samples}")
    result.losses += mine.loss is not None
    result.samples += len(mine.samples)


def compare_states(result: Comparison, rank: int, ours: Path, oracle: Path) -> None:
    paths = [final_path(folder, rank) for folder in (ours, oracle)]
    missing = [path for path in paths if not path.exists()]
    if missing:
        result.differences += [f"rank {rank}: no final state at {path}" for path in missing]
        return
    mine, other = (torch.load(path, weights_only=True) for path in paths)
    found = differences(mine, other)
    result.differences += [f"rank {rank}: final state differs at {path}" for path in found]
    for leaf in _leaves(mine):
        if isinstance(leaf, torch.Tensor):
            result.tensors += 1
            result.bytes += leaf.numel() * leaf.element_size()
        else:
            result.values += 1


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
