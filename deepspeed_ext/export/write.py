"""From an open snapshot to a checkpoint that DeepSpeed loads with ``load_checkpoint``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from deepspeed_ext.checkpoint_form import files_of
from deepspeed_ext.description import FRAMEWORK, deepspeed_version
from deepspeed_ext.export.tensors import CapturedTensors
from deepspeed_ext.export.values import fill
from megatron_ft.checkpoint import form
from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.form import CheckpointForm, Wanted
from megatron_ft.checkpoint.native import LATEST, latest_tag, step_of_tag
from megatron_ft.checkpoint.publish import whole_folder
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.core.errors import ExportError
from megatron_ft.core.objects import decode

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def folder_of(directory: Path, iteration: int) -> Path:
    """Where DeepSpeed keeps the checkpoint of a step, if the script names no tag."""
    return directory / f"global_step{iteration}"


def export(shards: OpenSnapshot, folder: Path) -> None:
    """Write ``folder``, one checkpoint of DeepSpeed's, from a snapshot.

    It appears whole or not at all.  ExportError if the snapshot does not say enough to make
    one.
    """
    installed = deepspeed_version()
    forms = {
        shard_id: CheckpointForm.from_bytes(shard.form).require(shard_id, FRAMEWORK, installed)
        for shard_id, shard in shards.items()
    }
    tensors = CapturedTensors(shards)
    with whole_folder(folder, shards) as partial:
        for shard_id, found in forms.items():
            objects = decode(shards[shard_id].objects)
            for name, recorded in files_of(found.state).items():
                _write(partial / _plain(name), _tree(recorded, shard_id, tensors), objects)


def announce(directory: Path, iteration: int) -> None:
    """Have DeepSpeed load this step, unless ``latest`` names a newer one.

    Its scripts that make one file of ZeRO's partitions are put beside, as DeepSpeed does.
    """
    if any(folder_of(directory, iteration).glob("*zero_pp_rank_*_optim_states.pt")):
        _copy_recovery_scripts(directory)
    known = step_of_tag(latest_tag(directory))
    if known is None or known <= iteration:
        Disk().write_file(directory / LATEST, [folder_of(directory, iteration).name.encode()])


def advice(directory: Path) -> str:
    """How to go on from what was exported."""
    return f"engine.load_checkpoint({str(directory)!r})"


def _tree(recorded: bytes, shard_id: str, tensors: CapturedTensors) -> Any:
    """One file's content, tensors in place; what the rank saved twice is one tensor."""
    made: dict[Wanted, Any] = {}

    def make(wanted: Wanted) -> Any:
        if wanted not in made:
            made[wanted] = tensors.make(shard_id, wanted)
        return made[wanted]

    return form.load(recorded, make)


def _write(path: Path, tree: Any, objects: dict[str, Any]) -> None:
    import torch

    fill(tree, objects)
    with path.open("xb") as stream:
        torch.save(tree, stream)


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ExportError(f"DeepSpeed would save {name!r}, which is no file's name")
    return name


def _copy_recovery_scripts(directory: Path) -> None:
    import deepspeed

    for name in _RECOVERY_SCRIPTS:
        shutil.copy(Path(deepspeed.__file__).parent / "utils" / name, directory / name)
        (directory / name).chmod(0o755)
