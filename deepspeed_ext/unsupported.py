"""What of DeepSpeed cannot be captured safely: refused by name before training starts.

Each entry is a state that lives where it cannot be read between two steps (files, another
process, graphs that DeepSpeed compiles), or that nobody could restore.

Which DeepSpeed releases work, and the check that this one has what is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.frameworks import (
    DEEPSPEED,
    Required,
    missing_names,
    owner_at,
    version_numbers,
)

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


_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


class Refusal(NamedTuple):
    """A JSON key, whether a configuration uses it, why that is refused, and what to do instead.

    ``used`` gets the DeepSpeedConfig of the engine.
    """

    key: str
    used: Callable[[Any], bool]
    why: str
    remedy: str

    def line(self) -> str:
        """The refusal in one line."""
        return f"{self.key}: {self.why}; {self.remedy}"


def _raw(config: Any, key: str) -> Any:
    """A top-level value as the user wrote it."""
    return config._param_dict.get(key)


def _enabled(config: Any, key: str) -> bool:
    section = _raw(config, key)
    return bool(section.get("enabled")) if isinstance(section, dict) else bool(section)


def _offload(config: Any, name: str) -> Any:
    """An offload section that is in use, else None."""
    section = getattr(config.zero_config, name)
    return section if section is not None and section.device != "none" else None


def _on_nvme(config: Any, name: str) -> bool:
    section = _offload(config, name)
    return section is not None and bool(section.device == "nvme")


def _optimizer(config: Any) -> str:
    return str(config.optimizer_name or "").lower()


def _uses_super_offload(config: Any) -> bool:
    section = _offload(config, "offload_optimizer")
    return section is not None and bool(section.super_offload)


def _splits_offload(config: Any) -> bool:
    section = _offload(config, "offload_optimizer")
    return section is not None and section.ratio < 1.0


REFUSALS = (
    Refusal(
        "zero_optimization.offload_optimizer.device",
        lambda c: _on_nvme(c, "offload_optimizer"),
        'with "nvme" the optimizer\'s state is in swap files between steps, not in memory',
        'use "cpu"',
    ),
    Refusal(
        "zero_optimization.offload_param.device",
        lambda c: _on_nvme(c, "offload_param"),
        'with "nvme" the parameters are in swap files between steps, not in memory',
        'use "cpu"',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        _uses_super_offload,
        "a process of its own updates the optimizer's state while the next step runs",
        "remove it, offload_optimizer itself is supported",
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        _splits_offload,
        "below 1.0 a second optimizer, with learning rates of its own, keeps part of the state",
        "set it to 1.0",
    ),
    Refusal(
        "zero_optimization.zenflow",
        lambda c: getattr(c.zero_config, "zenflow", None) is not None,
        "ZenFlow updates on the CPU while later steps run, and gathers gradients over several",
        "remove it, offload_optimizer without it is supported",
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        lambda c: bool(c.zero_config.zero_quantized_nontrainable_weights),
        "frozen weights are kept quantized, with scales that a restore cannot put back",
        "set it to false",
    ),
    Refusal(
        "zero_optimization.zeropp_loco_param",
        lambda c: getattr(c.zero_config, "zeropp_loco_param", None) is not None,
        "the error feedback of its quantized gradients is kept outside the optimizer",
        "remove it, zero_quantized_gradients without it is supported",
    ),
    Refusal(
        "zero_optimization.mics_shard_size",
        lambda c: getattr(c.zero_config, "mics_shard_size", -1) > 0,
        "MiCS partitions parameters over smaller groups than the stripes are made of",
        "remove it, later releases of DeepSpeed have removed MiCS too",
    ),
    Refusal(
        "compile.deepcompile",
        lambda c: bool(c.compile_config.deepcompile),
        "compiled graphs keep gathered weights and offloaded optimizer states of their own",
        "set it to false, engine.compile() without it is supported",
    ),
    Refusal(
        "hybrid_engine.enabled",
        lambda c: bool(c.hybrid_engine.enabled),
        "the hybrid engine rewrites weights between training and generation",
        "set it to false",
    ),
    Refusal(
        "optimizer.type",
        lambda c: _optimizer(c) in _ONE_BIT,
        "1-bit optimizers keep the errors of compressed communication per rank and buffer",
        'use "Adam" or "AdamW"',
    ),
    Refusal(
        "optimizer.type",
        lambda c: _optimizer(c) == "muon",
        "Muon stages its momentum outside the optimizer's state",
        'use "Adam" or "AdamW"',
    ),
    Refusal(
        "amp.enabled",
        lambda c: _enabled(c, "amp"),
        "the loss scale of Apex AMP is in Apex, where a restore cannot set it",
        'use "bf16", "fp16" or "torch_autocast"',
    ),
    Refusal(
        "compression_training",
        lambda c: bool(_raw(c, "compression_training")),
        "its schedule and masks are spread over replaced layers",
        "train without it, later releases of DeepSpeed have removed it too",
    ),
    Refusal(
        "quantize_training.enabled",
        lambda c: _enabled(c, "quantize_training"),
        "its bit widths and periods change outside the optimizer's state",
        "train without it, later releases of DeepSpeed have removed it too",
    ),
)
"""Everything that is refused; later releases reject some of the keys themselves."""


def refusals(engine: Any) -> list[str]:
    """Why snapshots of this engine would not be safe, one line a reason; empty if they are."""
    return [*config_refusals(engine._config), *_engine_refusals(engine)]


def config_refusals(config: Any) -> list[str]:
    """The reasons that a DeepSpeedConfig gives."""
    return [refusal.line() for refusal in REFUSALS if refusal.used(config)]


def _engine_refusals(engine: Any) -> list[str]:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if hasattr(inner, "step"):
        return []
    return [
        "optimizer: this engine has none, so nothing changes that a snapshot could save; give "
        'deepspeed.initialize an optimizer or a section "optimizer"'
    ]
