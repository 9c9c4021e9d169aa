"""GPT pretraining on the ``megatron-core`` package alone: the program that the demo trains.

    python -m megatron_ft.cli.demo.pretrain_gpt <Megatron flags> [--trace-dir DIRECTORY]

On a machine without CUDA it puts the CPU stand-in in place first.  Snapshots are on with
``--inmem-snapshot``, as in any Megatron program that calls :func:`megatron_ft.megatron.install`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.cli.demo import cpu_device


def take_trace_directory(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The value of ``--trace-dir``, None without one, and the flags that are Megatron's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trace-dir", type=Path)
    ours, megatrons = parser.parse_known_args(argv)
    return ours.trace_dir, megatrons


def pretrain() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_ft.cli.demo import gpt_training

    args = parse_and_validate_args()
    model = argument_utils.gpt_config_from_args(args)
    training.pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, model),
        train_valid_test_dataset_provider=gpt_training.datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=gpt_training.forward_step,
    )


def main() -> None:
    import megatron_ft.cli.demo.cpu_in_place  # noqa: I001  # before Megatron
    import megatron.core

    import megatron_ft.megatron
    from megatron_ft.cli.demo import megatron_trace

    print(f"> megatron-core {megatron.core.__version__}", flush=True)
    cpu_device.find_dataset_helper()
    megatron_ft.megatron.install()
    trace_dir, sys.argv[1:] = take_trace_directory(sys.argv[1:])
    if trace_dir is not None:
        megatron_trace.install(trace_dir)
    pretrain()


if __name__ == "__main__":
    # For trainer hosts, which import what a script imports.
    from megatron_ft.cli.demo import cpu_in_place, gpt_training, megatron_trace  # noqa: F401

    main()
elif __name__ == "__mp_main__" and cpu_device.needed():
    # A spawned child of a training process: it unpickles tensors, it does not train.
    cpu_device.install(megatron=False)
