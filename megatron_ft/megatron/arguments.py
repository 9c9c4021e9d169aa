"""Megatron flags, made from the fields of SnapshotConfig, and what they cannot go with."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_ft.config import SnapshotConfig
from megatron_ft.errors import ConfigError

GROUP_TITLE = "in-memory snapshots (megatron-ft)"
SWITCH = "--inmem-snapshot"


def flag_of(field_name: str) -> str:
    """The Megatron flag of a SnapshotConfig field: ``snapshot_interval`` has
    ``--inmem-snapshot-interval``."""
    return "--inmem-" + field_name.replace("_", "-")


def attribute_of(field_name: str) -> str:
    """Where the parsed flag stands on Megatron's ``args``."""
    return "inmem_" + field_name


def add_snapshot_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags in a group of their own and return the parser, as Megatron expects.

    A parser that already has them is left alone: Megatron parses several times, and a
    program may add the group itself.
    """
    group = parser.add_argument_group(title=GROUP_TITLE)
    try:
        group.add_argument(
            SWITCH,
            action="store_true",
            help="Keep snapshots of the training state in host memory and restore from them.",
        )
    except argparse.ArgumentError:
        return parser
    for field in dataclasses.fields(SnapshotConfig):
        # None, not the default: only then an environment variable can fill what no flag gives.
        group.add_argument(
            flag_of(field.name),
            type=type(field.default),
            default=None,
            help=f"{field.metadata['help']} Default: {field.default}.".replace("%", "%%"),
        )
    return parser


def is_enabled(args: Any) -> bool:
    """True if ``--inmem-snapshot`` was given; False too where the flag is unknown (YAML)."""
    return bool(getattr(args, "inmem_snapshot", False))


def config_from_args(args: Any) -> SnapshotConfig:
    """Settings by flag, else by environment variable, else the default.

    Raises ConfigError for a value out of range.
    """
    base = SnapshotConfig.from_env()
    given = {}
    for field in dataclasses.fields(SnapshotConfig):
        value = getattr(args, attribute_of(field.name), None)
        given[field.name] = getattr(base, field.name) if value is None else value
    return SnapshotConfig.from_mapping(given)


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, False))


_CONFLICTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--optimizer other than adam and sgd",
        lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
        "only the state of Adam and SGD is known",
    ),
    (
        "--optimizer-cuda-graph",
        _is_set("optimizer_cuda_graph"),
        "a replayed step passes no hook, so nothing would wait for a running capture",
    ),
    (
        "--qk-clip",
        _is_set("qk_clip"),
        "it changes weights after the step without changing their fp32 masters",
    ),
    (
        "--fp8-param-gather or --fp4-param-gather",
        lambda args: _is_set("fp8_param_gather")(args) or _is_set("fp4_param_gather")(args),
        "quantized weights do not follow bit by bit from their fp32 masters",
    ),
    (
        "--optimizer-cpu-offload",
        _is_set("optimizer_cpu_offload"),
        "parts of the optimizer step outside the fence",
    ),
    (
        "--use-megatron-fsdp or --use-torch-fsdp2",
        lambda args: _is_set("use_megatron_fsdp")(args) or _is_set("use_torch_fsdp2")(args),
        "their buffers are laid out differently",
    ),
    (
        "--use-layer-wise-distributed-optimizer",
        _is_set("use_layer_wise_distributed_optimizer"),
        "its shards are not known",
    ),
    ("--perform-rl-step", _is_set("perform_rl_step"), "rollouts are state that is not captured"),
    ("--skip-train", _is_set("skip_train"), "there is nothing to take a snapshot of"),
    (
        "--moe-use-upcycling",
        _is_set("moe_use_upcycling"),
        "upcycle first, then start a run with snapshots from the result",
    ),
    (
        "--inprocess-restart",
        _is_set("inprocess_restart"),
        "the supervisor restarts processes; use one of the two",
    ),
)


def conflicts(args: Any) -> list[str]:
    """Every reason why snapshots cannot go with these arguments, one line each."""
    return [f"{name}: {reason}" for name, clashes, reason in _CONFLICTS if clashes(args)]


def validate(args: Any) -> SnapshotConfig:
    """The settings; ConfigError that lists all conflicts, or the first bad value."""
    found = conflicts(args)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ConfigError(
            f"{SWITCH} does not work with these settings yet; drop them, or train without "
            f"{SWITCH}:{lines}"
        )
    return config_from_args(args)
