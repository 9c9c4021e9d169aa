"""The demo's training program for the tests: more flags of Megatron, and older releases.

python -m tests.programs.pretrain_gpt <Megatron flags> [--trace-dir DIRECTORY]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_ft.cli.demo import cpu_device, pretrain_gpt
from tests.support import megatron_host


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args: Any = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pg_collection=pg_collection,
    )


def pretrain() -> None:
    """Train with Megatron 0.17 or 0.18, whose ``pretrain`` takes a provider of the model.

    From 0.18 on it begins with a container of all settings; before, it parses the flags itself.
    """
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, training

    from megatron_ft.cli.demo import gpt_training

    settings: list[Any] = []
    if hasattr(argument_utils, "pretrain_cfg_container_from_args"):
        parsed = arguments.parse_and_validate_args()
        settings.append(argument_utils.pretrain_cfg_container_from_args(parsed))
    training.pretrain(
        *settings,
        train_valid_test_dataset_provider=gpt_training.datasets,
        model_provider=build_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=gpt_training.forward_step,
    )


def preload() -> None:
    """Import everything that ranks need, in the process that they are forked from."""
    megatron_host.install()
    for module in (
        "megatron.training.training",
        "megatron_ft.megatron.hooks",
        "megatron_ft.megatron.run",
        "megatron_ft.cli.demo.gpt_training",
        "megatron_ft.cli.demo.megatron_trace",
    ):
        import_module(module)


def main() -> None:
    megatron_host.install()
    # Runs that load Megatron's own checkpoint are compared with one that nothing ended.
    megatron_host.keep_data_loader_off_the_generator()
    from megatron.training import argument_utils

    if not hasattr(argument_utils, "gpt_config_from_args"):
        pretrain_gpt.pretrain = pretrain
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and cpu_device.needed():
    # A spawned child of a training process: it unpickles tensors, it does not train.
    cpu_device.install(megatron=False)
    megatron_host.copy_before_training_continues()
