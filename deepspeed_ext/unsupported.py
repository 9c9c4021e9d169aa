"""Refuses DeepSpeed releases that lack what is used, and modes that cannot be captured safely.

Each refused mode keeps a state that cannot be read between two steps, or that a restore could not
put back.  All are refused by name before training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.frameworks import DEEPSPEED, Required, check_release

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_BASE = "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"

_METHODS = ("_take_model_step", "step", "offload_states", "reload_states", "destroy")
_LOAD = ("load_dir", "tag", "load_optimizer_states", "load_module_only")

USED = (
    *(Required(_ENGINE, name) for name in _METHODS),
    Required(_ENGINE, "load_checkpoint", _LOAD),
    Required(_ENGINE, "save_checkpoint", ("save_dir", "tag", "client_state", "save_latest")),
    Required("deepspeed.runtime.pipe.engine.PipelineEngine", "train_batch"),
    Required(_BASE, "create", ("info",)),
    Required(_BASE, "save", ("state_dict", "path")),
    Required(_BASE, "load", ("path", "map_location")),
    Required(_BASE, "commit", ("info",)),
)


def check_deepspeed(required: Sequence[Required] = USED) -> None:
    import deepspeed

    check_release(DEEPSPEED, str(deepspeed.__version__), required, '"inmem_snapshot"')


class Refusal(NamedTuple):
    """A key of DeepSpeed's JSON, with the reason for its refusal and what to do instead.

    ``used`` judges the value that the user gave it.
    """

    key: str
    reason: str
    used: Callable[[Any], bool] = bool


_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam", "muon")


def _on_nvme(device: Any) -> bool:
    return bool(device == "nvme")


REFUSALS = (
    Refusal(
        "zero_optimization.offload_optimizer.device",
        'with "nvme" the optimizer\'s state is in swap files between steps; use "cpu"',
        _on_nvme,
    ),
    Refusal(
        "zero_optimization.offload_param.device",
        'with "nvme" the parameters are in swap files between steps; use "cpu"',
        _on_nvme,
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        "a process of its own updates the state while the next step runs; remove it",
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        "below 1.0 a second optimizer keeps part of the state; set it to 1.0",
        lambda ratio: ratio < 1.0,
    ),
    Refusal(
        "zero_optimization.zenflow",
        "it updates on the CPU while later steps run; use offload_optimizer without it",
        lambda section: True,
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "frozen weights get scales that a restore cannot put back; set it to false",
    ),
    Refusal(
        "zero_optimization.zeropp_loco_param",
        "errors of quantized gradients are kept outside the optimizer; remove it",
        lambda section: True,
    ),
    Refusal(
        "zero_optimization.mics_shard_size",
        "parameters are partitioned over smaller groups than stripes are made of; remove it",
        lambda size: size > 0,
    ),
    Refusal(
        "compile.deepcompile",
        "compiled graphs keep weights and optimizer states of their own; set it to false",
    ),
    Refusal(
        "hybrid_engine.enabled",
        "weights are rewritten between training and generation; set it to false",
    ),
    Refusal(
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        "DeepSpeed cannot restore this sampler exactly; set it to false, or sort the data before",
    ),
    Refusal(
        "checkpoint.writer",
        "its checkpoints cannot be loaded, or are named before they are written; remove it",
        lambda section: True,
    ),
    Refusal(
        "datastates_ckpt",
        "its checkpoints never reach `latest`; remove it",
        lambda section: section is not False,
    ),
    Refusal(
        "optimizer.type",
        'the errors or momentum of this optimizer are kept outside its state; use "AdamW"',
        lambda name: str(name).lower() in _OPTIMIZERS,
    ),
    Refusal("amp.enabled", 'a restore cannot set the loss scale of Apex; use "bf16" or "fp16"'),
    Refusal("compression_training", "its schedule and masks cannot be restored; remove it"),
    Refusal("quantize_training.enabled", "its bit widths cannot be restored; set it to false"),
)
"""Everything that is refused; later releases reject some of the keys themselves."""


def refusals(engine: Any) -> list[str]:
    """Reasons why snapshots of this engine are not safe, one line each; empty if they are."""
    from deepspeed.accelerator import get_accelerator

    found, inner = config_refusals(engine._config), engine.optimizer
    if (device := get_accelerator().device_name()) not in ("cpu", "cuda"):
        found.append(f"DS_ACCELERATOR: {device} is not known to snapshots; use cuda or cpu")
    if not hasattr(getattr(inner, "optimizer", inner), "step"):
        found.append(
            "optimizer: this engine has none, so nothing changes that a snapshot could save; give "
            'deepspeed.initialize an optimizer or a section "optimizer"'
        )
    else:
        found += _optimizer_refusals(engine)
    return found


def _optimizer_refusals(engine: Any) -> list[str]:
    from deepspeed_ext.optimizers import view_of
    from megatron_ft.trainer.optimizer_classes import optimizer_class

    try:
        optimizer_class(view_of(engine).inner)
    except ConfigError as error:
        return [f"optimizer: {error}"]
    return []


def config_refusals(config: Any) -> list[str]:
    given = ((refusal, _given(config._param_dict, refusal.key)) for refusal in REFUSALS)
    return [f"{r.key}: {r.reason}" for r, value in given if value is not None and r.used(value)]


def _given(section: Any, key: str) -> Any:
    """The value that the user gave a key, None for none, or in a section that is off."""
    for name in key.split("."):
        if not isinstance(section, Mapping) or section.get("device") == "none":
            return None
        section = section.get(name)
    return section
