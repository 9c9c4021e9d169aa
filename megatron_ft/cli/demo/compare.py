"""Two runs of the same training, compared bit by bit, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.cli.demo.trace import TraceLine, final_lines, final_path, read_trace


@dataclass
class Comparison:
    """What was compared and where it differs; ``differences`` is empty if nothing does."""

    losses: int = 0
    samples: int = 0
    tensors: int = 0
    values: int = 0
    bytes: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether there was something to compare and every bit of it is the same."""
        return not self.differences and self.tensors > 0 and self.losses > 0


def compare_runs(ours: Path, oracle: Path, world_size: int, iterations: int) -> Comparison:
    """Compare trace and final state of every rank in two trace folders.

    The last occurrence of an iteration counts; each of 1 to ``iterations`` must be there.
    """
    result = Comparison()
    for rank in range(world_size):
        traces = [final_lines(read_trace(folder, rank)) for folder in (ours, oracle)]
        compare_traces(result, rank, traces[0], traces[1], iterations)
        compare_states(result, rank, ours, oracle)
    return result


def compare_traces(
    result: Comparison,
    rank: int,
    ours: dict[int, TraceLine],
    oracle: dict[int, TraceLine],
    iterations: int,
) -> None:
    """Compare losses and sample indices of one rank; adds to ``result``."""
    for iteration in range(1, iterations + 1):
        mine, other = ours.get(iteration), oracle.get(iteration)
        where = f"rank {rank} iteration {iteration}"
        if mine is None or other is None:
            run = "our run" if mine is None else "the uninterrupted run"
            result.differences.append(f"{where}: missing in {run}")
            continue
        if mine.loss != other.loss:
            result.differences.append(
                f"{where}: loss {mine.loss_value!r}, uninterrupted {other.loss_value!r}"
            )
        if mine.samples != other.samples:
            result.differences.append(
                f"{where}: samples {mine.samples}, uninterrupted {other.samples}"
            )
        result.losses += mine.loss is not None
        result.samples += len(mine.samples)


def compare_states(result: Comparison, rank: int, ours: Path, oracle: Path) -> None:
    """Compare all that one rank held at the end; adds to ``result``."""
    import torch

    from megatron_ft.cli.demo import final_state

    missing = [p for p in (final_path(f, rank) for f in (ours, oracle)) if not p.exists()]
    if missing:
        result.differences += [f"rank {rank}: no final state at {path}" for path in missing]
        return
    mine, other = (torch.load(final_path(f, rank), weights_only=True) for f in (ours, oracle))
    found = final_state.differences(mine, other)
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
