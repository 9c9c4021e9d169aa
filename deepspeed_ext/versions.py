"""Which DeepSpeed releases work, and the check that this one has what is used."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.required_names import Required, missing_names, owner_at, version_numbers
from megatron_ft.core.supported import DEEPSPEED

OLDEST, WORKING = DEEPSPEED.oldest, DEEPSPEED.working

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_BASE = "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"

USED = (
    Required(_ENGINE, "_configure_checkpointing"),
    Required(_ENGINE, "_take_model_step"),
    Required(_ENGINE, "step"),
    Required(
        _ENGINE,
        "load_checkpoint",
        ("load_dir", "tag", "load_optimizer_states", "load_module_only"),
    ),
    Required(_ENGINE, "save_checkpoint", ("save_dir", "tag", "client_state", "save_latest")),
    Required(_ENGINE, "offload_states"),
    Required(_ENGINE, "reload_states"),
    Required(_ENGINE, "destroy"),
    Required("deepspeed.runtime.pipe.engine.PipelineEngine", "train_batch"),
    Required(_BASE, "create", ("info",)),
    Required(_BASE, "save", ("state_dict", "path")),
    Required(_BASE, "load", ("path", "map_location")),
    Required(_BASE, "commit", ("info",)),
    Required(_BASE, "is_decoupled"),
)


def check_deepspeed(required: Sequence[Required] = USED) -> None:
    """Check the imported DeepSpeed; UnsupportedVersionError naming releases that work."""
    import deepspeed

    version = str(deepspeed.__version__)
    if version_numbers(version) < OLDEST:
        raise UnsupportedVersionError(
            f"DeepSpeed {version} is too old for in-memory snapshots, which work with {WORKING}; "
            'upgrade DeepSpeed, or train without "inmem_snapshot"'
        )
    missing = [text for entry in required for text in missing_names(owner_at(entry.owner), entry)]
    if missing:
        raise UnsupportedVersionError(
            f"DeepSpeed {version} has no {'; no '.join(missing)}. In-memory snapshots work with "
            f'{WORKING}: use one of those, or train without "inmem_snapshot"'
        )
