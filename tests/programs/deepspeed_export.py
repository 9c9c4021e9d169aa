"""What forked processes run to test exports of DeepSpeed's files."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_ft.checkpoint.export import MARK, export
from megatron_ft.cli.chaos.trace import trace_path
from megatron_ft.core.errors import ExportError
from tests.programs.deepspeed_program import ENVIRONMENT, line, make_engine, train_step
from tests.support.arena_folder import open_arenas

ARENAS, EXPORTED, REFERENCE = "TEST_ARENAS", "TEST_EXPORTED", "TEST_REFERENCE"
assert ENVIRONMENT


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two contents of files differ: types, order, bits, whether a tensor wants gradients."""
    if type(ours) is not type(theirs):
        return [f"{path}: {type(ours).__name__}, not {type(theirs).__name__}"]
    if isinstance(ours, torch.Tensor):
        return _of_tensors(ours, theirs, path)
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{path}: {list(ours)}, not {list(theirs)}"]
        pairs = ((key, ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} elements, not {len(theirs)}"]
        pairs = ((at, *pair) for at, pair in enumerate(zip(ours, theirs, strict=True)))
    elif hasattr(ours, "__dict__") and not isinstance(ours, type):
        return differences(vars(ours), vars(theirs), path)
    else:
        return [] if ours == theirs else [f"{path}: {ours!r}, not {theirs!r}"]
    return [text for key, one, other in pairs for text in differences(one, other, f"{path}/{key}")]


def _of_tensors(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> list[str]:
    kinds = [(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return [f"{path}: {kinds[0]}, not {kinds[1]}"]
    bits = [t.detach().contiguous().flatten().view(torch.uint8) for t in (ours, theirs)]
    return [] if torch.equal(*bits) else [f"{path}: other values"]


def compare_export() -> None:
    """Export, compare with what DeepSpeed saved itself, print what differs."""
    with ExitStack() as stack:
        shards = open_arenas(Path(os.environ[ARENAS]), stack)
        folder, advice = export(shards, Path(os.environ[EXPORTED]))
    theirs = Path(os.environ[REFERENCE])
    names = [_names(folder.parent), _names(theirs)]
    found = [] if names[0] == names[1] else [f"files {names[0]}, not {names[1]}"]
    for name in names[1]:
        found += compare_files(folder.parent / name, theirs / name)
    print(f"compared {len(names[1])} files, {advice}")
    finish(found)


def finish(found: list[str]) -> None:
    """Leave with 1 if anything differs."""
    if found:
        print("\n".join(found))
        sys.exit(1)


def _names(directory: Path) -> list[str]:
    """All files but DeepSpeed's scripts, which are in its package too, and our mark."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.suffix != ".py"]
    return sorted(str(p.relative_to(directory)) for p in files if p.name != MARK)


def compare_files(ours: Path, theirs: Path) -> list[str]:
    if theirs.suffix != ".pt":
        return [] if ours.read_bytes() == theirs.read_bytes() else [f"{ours.name}: other bytes"]
    mine, other = (torch.load(path, weights_only=False) for path in (ours, theirs))
    return differences(mine, other, theirs.name)


def refuse_export() -> None:
    """Print why a snapshot cannot be exported, and what was left behind."""
    target = Path(os.environ[EXPORTED])
    with ExitStack() as stack:
        shards = open_arenas(Path(os.environ[ARENAS]), stack)
        try:
            export(shards, target)
        except ExportError as error:
            print(f"refused: {error}; left behind: {list(target.glob('*'))}")


def convert() -> None:
    """Run DeepSpeed's converters on an export; print what differs from their own sources."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ours, theirs = Path(os.environ[EXPORTED]), Path(os.environ[REFERENCE])
    whole = [get_fp32_state_dict_from_zero_checkpoint(str(folder)) for folder in (ours, theirs)]
    found = differences(dict(whole[0]), dict(whole[1]), "fp32")
    tag = (ours / "latest").read_text()
    universal = ours.with_name("universal")
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        Namespace(
            input_folder=str(ours / tag),
            output_folder=str(universal),
            strict=True,
            inject_missing_state=True,
            **arguments,
        )
    )
    trained = [path.parent.name for path in universal.glob("zero/*/exp_avg.pt")]
    for name in trained:
        made = torch.load(universal / "zero" / name / "fp32.pt", weights_only=False)["param"]
        weight = whole[0][name].detach()
        found += differences(made.detach().view(weight.shape), weight, name)
    print(f"converted {len(trained)} weights")
    finish(found)


def with_unknown(options: dict[str, Any]) -> dict[str, Any]:
    """A model that saves a tensor that is neither a parameter nor a buffer."""
    from tests.programs import deepspeed_models

    made = deepspeed_models.small(options)
    made["model"].register_state_dict_post_hook(
        lambda _module, state, prefix, _local: state.update({f"{prefix}unknown": torch.ones(3)})
    )
    return made


def train_stock() -> None:
    """Continue from a checkpoint as plain DeepSpeed does, without anything of ours."""
    from megatron_ft.cli.chaos.trace import final_path
    from megatron_ft.cli.demo import final_state
    from tests.support.deepspeed_final import collect

    cell, steps, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    engine = make_engine(cell)
    loaded, _ = engine.load_checkpoint(os.environ[EXPORTED])
    print(f"loaded {loaded}")
    rank = torch.distributed.get_rank()
    with trace_path(folder, rank).open("a") as trace:
        while engine.global_steps < steps:
            losses = train_step(engine)
            trace.write(line(rank, engine.global_steps, losses))
    final_state.write(final_path(folder, rank), collect(engine))
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()
