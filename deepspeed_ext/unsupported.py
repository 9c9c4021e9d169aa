"""Refuses DeepSpeed releases that lack what is used, and modes that cannot be captured safely.

Each refused mode keeps a state where it cannot be read between two steps (files, another process,
graphs that DeepSpeed compiles), or that a restore could not put back.  All are refused by name
before training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
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


def _raw(config: Any, key: str) -> Any:
    """A top-level value as the user wrote it."""
    return config._param_dict.get(key)


def _enabled(config: Any, key: str) -> bool:
    section = _raw(config, key)
    return bool(section.get("enabled")) if isinstance(section, dict) else bool(section)


_NO_OFFLOAD = SimpleNamespace(device="none", super_offload=False, ratio=1.0)


def _offload(config: Any, name: str) -> Any:
    """An offload section that is in use, else one that offloads nothing."""
    section = getattr(config.zero_config, name)
    return _NO_OFFLOAD if section is None or section.device == "none" else section


def _optimizer(config: Any) -> str:
    return str(config.optimizer_name or "").lower()


REFUSALS = (
    Refusal(
        "zero_optimization.offload_optimizer.device",
        lambda c: _offload(c, "offload_optimizer").device == "nvme",
        'with "nvme" the optimizer\'s state is in swap files between steps, not in memory',
        'use "cpu"',
    ),
    Refusal(
        "zero_optimization.offload_param.device",
        lambda c: _offload(c, "offload_param").device == "nvme",
        'with "nvme" the parameters are in swap files between steps, not in memory',
        'use "cpu"',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        lambda c: bool(_offload(c, "offload_optimizer").super_offload),
        "a process of its own updates the optimizer's state while the next step runs",
        "remove it, offload_optimizer itself is supported",
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda c: _offload(c, "offload_optimizer").ratio < 1.0,
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
    """Reasons why snapshots of this engine are not safe, one line each; empty if they are."""
    found, inner = config_refusals(engine._config), engine.optimizer
    if not hasattr(getattr(inner, "optimizer", inner), "step"):
        found.append(
            "optimizer: this engine has none, so nothing changes that a snapshot could save; give "
            'deepspeed.initialize an optimizer or a section "optimizer"'
        )
    return found


def config_refusals(config: Any) -> list[str]:
    """The reasons that a DeepSpeedConfig gives."""
    return [f"{r.key}: {r.why}; {r.remedy}" for r in REFUSALS if r.used(config)]
