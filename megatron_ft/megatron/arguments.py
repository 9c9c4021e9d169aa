"""The ``--inmem-*`` flags on Megatron's parser, and what they cannot go with."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ft.config import (
    SETTINGS,
    SWITCH,
    SnapshotConfig,
    environment_source,
    nearest,
    refuse,
    resolve,
)
from megatron_ft.config.flags import (
    add_flags,
    attribute_of,
    flag_source,
    job_contradictions,
    read_command,
)
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import MAY_SHRINK
from megatron_ft.megatron import fewer_ranks

GROUP_TITLE = "in-memory snapshots (megatron-ft)"


def add_snapshot_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags in a group of their own and return the parser: an ``extra_args_provider``.

    A parser that already has them is left alone: Megatron parses several times, and a
    program may add the group itself.
    """
    group = parser.add_argument_group(title=GROUP_TITLE)
    try:
        add_flags(group)
    except argparse.ArgumentError:
        return parser
    return parser


def is_enabled(args: Any) -> bool:
    """True if ``--inmem-snapshot`` was given; False too where the flag is unknown (YAML)."""
    return bool(getattr(args, "inmem_snapshot", False))


def config_from_args(args: Any) -> SnapshotConfig:
    """Settings by flag, else by environment variable, else the default.

    Raises ConfigError that lists all values out of range.
    """
    return resolve(flag_source(args), environment_source())


_QUANTIZED = (
    "quantized weights do not follow bit by bit from their fp32 masters; without it weights stay "
    "in 16 bits, which takes about 1 byte a parameter more"
)
_FSDP = "its shards are not captured yet; use --use-distributed-optimizer instead"
_SHARDS = "which ranks then hold the same weights is not known here"

UNSUPPORTED = {
    "optimizer": "only the state of adam, sgd and muon is known",
    "muon_scalar_optimizer": "with muon, only the state of adam is known",
    "optimizer_cuda_graph": "a replayed step passes no hook: nothing would wait for a capture",
    "qk_clip": "it changes weights after the step without changing their fp32 masters",
    "fp8_param_gather": _QUANTIZED,
    "fp4_param_gather": _QUANTIZED,
    "optimizer_cpu_offload": "parts of the optimizer step outside the fence",
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
    "gtp_weight_remat_size": _SHARDS,
    "expert_gtp_weight_remat_size": _SHARDS,
    "perform_rl_step": "rollouts are state that is not captured",
    "skip_train": "there is nothing to take a snapshot of",
    "moe_use_upcycling": "upcycle first, then start a run with snapshots from the result",
    "inprocess_restart": "the supervisor restarts processes; use one of the two",
}
"""Reasons why snapshots cannot go with a flag of Megatron's, by the name of its value."""

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "optimizer": (None, "adam", "sgd", "muon"),
    "muon_scalar_optimizer": (None, "adam"),
    "gtp_weight_remat_size": (None, 1),
    "expert_gtp_weight_remat_size": (None, 1),
}
"""Values that are supported; of all others None, False and 0 are."""

_FLAGS = {
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size": "expert_tensor_parallel_num_weight_shards",
}
"""Flags that are not called like their values."""


def conflicts(args: Any) -> list[str]:
    """Every reason why snapshots cannot go with these arguments, one line each."""
    return [
        f"--{_FLAGS.get(name, name).replace('_', '-')}: {reason}"
        for name, reason in UNSUPPORTED.items()
        if getattr(args, name, None) not in _HARMLESS.get(name, (None, False))
    ]


def contradictions(args: Any, environment: Mapping[str, str] | None = None) -> list[str]:
    """Flags that differ from what the supervisor uses; it cannot have seen those in a YAML file
    or inside a shell script."""
    return job_contradictions(flag_source(args), "reads no files or scripts", environment)


def check(args: Any, command: Sequence[str]) -> None:
    """Refuse, before anything is built, what cannot work; ``command`` is the program's argv.

    Raises one ConfigError that lists every conflict with Megatron's flags, every unknown name,
    every value out of range and every contradiction to the supervisor.
    """
    refuse(_unread_flags(args, command) + _unknown_keys(args))
    if is_enabled(args):
        validate(args)


def _unread_flags(args: Any, command: Sequence[str]) -> list[str]:
    """Problems of flags with a YAML file: Megatron reads no flags and would train unprotected."""
    if getattr(args, "yaml_cfg", None) is None:
        return []
    given = read_command(command)
    names = [SWITCH.lstrip("-")] if given.enabled else []
    names += [SETTINGS[name].flag.lstrip("-") for name in given.source.given]
    return [
        f"--{name} has no effect with --yaml-cfg: write `{name.replace('-', '_')}` into "
        f"{args.yaml_cfg}"
        for name in names
    ]


def _unknown_keys(args: Any) -> list[str]:
    known = ["inmem_snapshot", *(attribute_of(name) for name in SETTINGS)]
    found = [name for name in vars(args) if name.startswith("inmem_") and name not in known]
    return [f"unknown setting {name}; {nearest(name, known, 'inmem_')}" for name in found]


def validate(args: Any) -> SnapshotConfig:
    """The settings; one ConfigError that lists all conflicts, bad values and contradictions."""
    problems = conflicts(args)
    config = SnapshotConfig()
    try:
        config = config_from_args(args)
        problems += contradictions(args)
        if config.on_no_spare in MAY_SHRINK:
            problems += fewer_ranks.refusals(args)
    except ConfigError as error:
        problems.append(str(error).strip())
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise ConfigError(
            f"{SWITCH} does not work with these settings; change them, or train without "
            f"{SWITCH}:{lines}"
        )
    return config
