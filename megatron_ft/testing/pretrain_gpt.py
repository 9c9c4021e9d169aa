"""GPT pretraining on the ``megatron-core`` package alone: the demo's and the tests' program.

    python -m megatron_ft.testing.pretrain_gpt <Megatron flags> [--trace-dir DIRECTORY]

Serves Megatron 0.18 and later.  On a machine without CUDA it puts the CPU stand-in in
place first.  Snapshots are on with ``--inmem-snapshot``, as in any Megatron program that
calls :func:`megatron_ft.megatron.install`.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

from megatron_ft.testing import cpu_device


def add_trace_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flag that Megatron does not know; passed on as its ``extra_args_provider``."""
    group = parser.add_argument_group(title="trace (megatron_ft.testing)")
    group.add_argument(
        "--trace-dir",
        type=Path,
        default=None,
        help="Folder for one JSON line per iteration and rank, and each rank's final state.",
    )
    return parser


def pretrain_arguments(args: Any) -> tuple[Any, dict[str, Any]]:
    """The config container and the keywords that this release's ``pretrain`` accepts."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, training

    from megatron_ft.testing import gpt_training

    offered: dict[str, Any] = {
        "train_valid_test_dataset_provider": gpt_training.datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": gpt_training.forward_step,
    }
    make_config = argument_utils.pretrain_cfg_container_from_args
    if hasattr(argument_utils, "gpt_config_from_args"):  # 0.19 builds the model from a config
        config = make_config(args, argument_utils.gpt_config_from_args(args))
    else:
        config = make_config(args)
        offered["model_provider"] = gpt_training.build_model
    accepted = inspect.signature(training.pretrain).parameters
    return config, {name: value for name, value in offered.items() if name in accepted}


def main() -> None:
    """Parse ``sys.argv`` as Megatron does, and train."""
    if cpu_device.needed():
        cpu_device.install()
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    import megatron_ft.megatron
    from megatron_ft.testing import training_trace

    megatron_ft.megatron.install()
    args = parse_and_validate_args(extra_args_provider=add_trace_arguments)
    trace_dir, args.trace_dir = args.trace_dir, None  # Megatron pickles its arguments
    if trace_dir is not None:
        training_trace.install(trace_dir)
    config, keywords = pretrain_arguments(args)
    training.pretrain(config, **keywords)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and cpu_device.needed():
    # A spawned child of a training process: it unpickles tensors, it does not train.
    cpu_device.install(megatron=False)
