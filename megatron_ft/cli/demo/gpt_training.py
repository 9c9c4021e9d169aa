"""The parts that Megatron asks of a GPT pretraining program: batches, loss, data sets, model.

Importing this module imports Megatron; :mod:`megatron_ft.cli.demo.pretrain_gpt` does so
after the CPU stand-in is in place.  It needs only the ``megatron-core`` package, which
holds ``megatron.training`` but no program that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_ft.core.errors import ConfigError

_BATCH_KEYS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
}


def get_batch(iterator: Iterator[Any]) -> dict[str, torch.Tensor]:
    args, group = get_args(), mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    row = next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch: dict[str, torch.Tensor] = {}
    for key, dtype in _BATCH_KEYS.items():
        shape = (args.micro_batch_size, args.seq_length)
        value = row[key].cuda() if row else torch.empty(shape, dtype=dtype, device="cuda")
        torch.distributed.broadcast(value, source, group=group)
        batch[key] = value
    causal = torch.ones(args.seq_length, args.seq_length, device="cuda").triu(1).bool()
    return {**batch, "attention_mask": causal[None, None]}


def forward_step(iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the output and the function that makes a loss of it."""
    empty: dict[str, Any] = dict.fromkeys((*_BATCH_KEYS, "attention_mask"))
    batch = empty if iterator is None else get_batch(iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"].view(-1)
        total, count = (output.float().view(-1) * mask).sum(), mask.sum().to(torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        raise ConfigError(
            "no --data-path: give the prefix that `python -m megatron_ft.cli.demo.stdlib_corpus "
            "DIRECTORY` prints"
        )
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron reads this mark
