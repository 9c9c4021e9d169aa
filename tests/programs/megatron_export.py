"""What a forked process runs to test exports: Megatron is imported, no rank is started."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ft.checkpoint import native
from megatron_ft.checkpoint.captured import GlobalTensors
from megatron_ft.checkpoint.export import TensorRecipe, load_form
from megatron_ft.checkpoint.source import OpenSnapshot, ShardParts
from megatron_ft.cli.demo import final_state
from megatron_ft.core.errors import ExportError
from megatron_ft.megatron.exporter import export, form_of
from megatron_ft.megatron.save_form import sharded_tensors
from tests.support.arena_folder import open_arenas

ARENAS, EXPORTED, REFERENCE = "TEST_ARENAS", "TEST_EXPORTED", "TEST_REFERENCE"

Box = tuple[slice, ...]


def read_checkpoint(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    # Tests import this module for its names, and these imports take seconds.
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(
        content,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    if (folder / "common.pt").exists():
        content["common.pt"] = torch.load(folder / "common.pt", weights_only=False)
    return {key: plain(value) for key, value in content.items()}


def plain(value: Any) -> Any:
    """Values that final_state.differences compares: objects become dicts of what they hold."""
    if isinstance(value, io.BytesIO):
        return plain(torch.load(io.BytesIO(value.getvalue()), weights_only=False))
    if isinstance(value, dict):
        return {repr(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) and not callable(value):
        return plain(vars(value))
    return value


def padding(shards: OpenSnapshot) -> Iterator[tuple[str, Box]]:
    """Where Megatron itself saves whatever was in memory, between parameters."""
    for shard_id, shard in shards.items():
        tree, _ = load_form(form_of(shard_id, shard.form).state)
        for leaf in sharded_tensors(tree):
            if isinstance(leaf.data, TensorRecipe) and not leaf.data.name:
                starts = zip(leaf.global_offset, leaf.local_shape, strict=True)
                yield leaf.key, tuple(slice(start, start + size) for start, size in starts)


def compare_export() -> None:
    """Export, compare with what Megatron saved itself, print what differs."""
    with ExitStack() as stack:
        shards = open_arenas(Path(os.environ[ARENAS]), stack)
        folder = native.checkpoint_folder(Path(os.environ[EXPORTED]), shards.info.iteration)
        export(shards, folder)
        native.point_tracker(folder.parent, shards.info.iteration)
        gaps = list(padding(shards))
    ours, theirs = read_checkpoint(folder), read_checkpoint(Path(os.environ[REFERENCE]))
    for key, box in gaps:
        for content in (ours, theirs):
            content[key][box] = 0
    print(f"compared {len(theirs)} entries, {len(gaps)} gaps left out")
    finish(final_state.differences(ours, theirs))


def refuse_export() -> None:
    """Print why a snapshot cannot be exported, and what was left behind."""
    target = Path(os.environ[EXPORTED])
    with ExitStack() as stack:
        shards = open_arenas(Path(os.environ[ARENAS]), stack)
        try:
            export(shards, native.checkpoint_folder(target, shards.info.iteration))
        except ExportError as error:
            print(f"refused: {error}; left behind: {list(target.glob('*'))}")


def read_all() -> None:
    print(f"read {len(read_checkpoint(Path(os.environ[EXPORTED])))} entries")


def compare_checkpoints() -> None:
    folders = [Path(os.environ[name]) for name in (EXPORTED, REFERENCE)]
    exported, reference = (read_checkpoint(folder) for folder in folders)
    finish(final_state.differences(exported, reference))


def global_tensors(shards: OpenSnapshot) -> dict[str, torch.Tensor]:
    """Every tensor of the unsharded model that the logical maps speak of, put together."""
    parts = {
        shard_id: ShardParts(shard.layout, partial(_bytes, shard.data))
        for shard_id, shard in shards.items()
    }
    tensors = GlobalTensors(parts)
    placed = {
        piece.global_name
        for shard in shards.values()
        for entry in shard.layout.entries
        if entry.logical is not None
        for piece in entry.logical.pieces
    }
    return {name: tensors.read(name) for name in placed}


def _bytes(data: NDArray[np.uint8], start: int, stop: int) -> NDArray[np.uint8]:
    return data[start:stop]


def compare_logical_map() -> None:
    """Put all global tensors together and compare them with those that Megatron saved."""
    with ExitStack() as stack:
        ours = global_tensors(open_arenas(Path(os.environ[ARENAS]), stack))
        theirs = read_checkpoint(Path(os.environ[REFERENCE]))
        saved = {key for key, value in theirs.items() if isinstance(value, torch.Tensor)}
        derived = {key.removeprefix("optimizer.state.param.") for key in ours}
        derived |= {key.removeprefix("optimizer.state.fp32_param.") for key in ours}
        missing = sorted(saved - ours.keys() - derived)
        # Megatron saves neither steps nor counters that are zero at an iteration's end.
        unsaved = {key for key in ours if key.startswith("optimizer.state.step.")}
        unsaved |= {key for key in ours if key.endswith(".local_tokens_per_expert")}
        unknown = sorted(ours.keys() - saved - unsaved)
        assert all(len({*ours[key].reshape(-1).tolist()}) == 1 for key in unsaved)
        common = ours.keys() & saved
        different = final_state.differences(
            {key: ours[key] for key in common}, {key: theirs[key] for key in common}
        )
        print(f"compared {len(common)} global tensors, {len(unsaved)} that are not saved")
    finish([f"missing {key}" for key in missing] + [f"unknown {key}" for key in unknown])
    finish(different)


def finish(differences: list[str]) -> None:
    """Leave with 1 if anything differs."""
    if differences:
        print("\n".join(differences))
        sys.exit(1)
