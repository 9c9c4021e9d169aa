"""GPT pretraining on the ``megatron-core`` package alone: the demo's and the tests' program.

    python -m megatron_ft.cli.demo.pretrain_gpt <Megatron flags> [--trace-dir DIRECTORY]

Serves Megatron 0.17 and later.  On a machine without CUDA it puts the CPU stand-in in
place first.  Snapshots are on with ``--inmem-snapshot``, as in any Megatron program that
calls :func:`megatron_ft.megatron.install`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.cli.demo import cpu_device


def take_trace_directory(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The value of ``--trace-dir``, None without one, and the flags that are Megatron's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trace-dir", type=Path)
    ours, megatrons = parser.parse_known_args(argv)
    return ours.trace_dir, megatrons


def pretrain_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values and keywords that this release's ``pretrain`` accepts.

    From 0.18 on that begins with a container of all settings, made of the parsed flags;
    before, ``pretrain`` parses them itself.
    """
    from megatron.core.enums import ModelType
    from megatron.training import training

    from megatron_ft.cli.demo import gpt_training

    offered: dict[str, Any] = {
        "train_valid_test_dataset_provider": gpt_training.datasets,
        "model_provider": gpt_training.build_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": gpt_training.forward_step,
    }
    accepted = inspect.signature(training.pretrain).parameters
    keywords = {name: value for name, value in offered.items() if name in accepted}
    if "args_defaults" in accepted:
        return (), keywords
    config, builds_model = _parsed_config()
    if builds_model:
        keywords.pop("model_provider", None)
    return (config,), keywords


def _parsed_config() -> tuple[Any, bool]:
    """The container, and whether the model is built from it (0.19) or by a provider (0.18)."""
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args, make = parse_and_validate_args(), argument_utils.pretrain_cfg_container_from_args
    if hasattr(argument_utils, "gpt_config_from_args"):
        return make(args, argument_utils.gpt_config_from_args(args)), True
    return make(args), False


def main() -> None:
    """Parse ``sys.argv`` as Megatron does, and train."""
    if cpu_device.needed():
        cpu_device.install()
    import megatron.core
    from megatron.training import training

    import megatron_ft.megatron
    from megatron_ft.cli.demo import megatron_trace

    print(f"> megatron-core {megatron.core.__version__}", flush=True)
    megatron_ft.megatron.install()
    trace_dir, sys.argv[1:] = take_trace_directory(sys.argv[1:])
    if trace_dir is not None:
        megatron_trace.install(trace_dir)
    values, keywords = pretrain_arguments()
    training.pretrain(*values, **keywords)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and cpu_device.needed():
    # A spawned child of a training process: it unpickles tensors, it does not train.
    cpu_device.install(megatron=False)
