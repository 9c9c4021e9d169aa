"""An unmodified transformers.Trainer script: a small GPT-2, trained on a text's bytes.

    megatron-ft run --nodes 4 --spares 1 --protect rs:3+1 -- \\
        python examples/hf_trainer.py --deepspeed ds_zero1.json --output_dir out --max_steps 40

It has the shape of the scripts in transformers' own examples.  All that switches snapshots on is
``"inmem_snapshot": {"enabled": true}`` in the DeepSpeed JSON.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArguments:
    """The training data."""

    text: str = field(default=__file__, metadata={"help": "a file, whose bytes are the tokens"})
    sequence: int = field(default=32, metadata={"help": "tokens of a sample"})
    samples: int = field(default=64, metadata={"help": "samples to read, at most"})


def read(data: DataArguments) -> list[dict[str, list[int]]]:
    """The text, cut into samples."""
    content = Path(data.text).read_bytes()
    starts = range(0, len(content) - data.sequence, data.sequence)[: data.samples]
    rows = [list(content[start : start + data.sequence]) for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train from the newest checkpoint, and save the model."""
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=data.sequence, **sizes))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=read(data),
        data_collator=default_data_collator,
    )
    checkpoint = None
    if os.path.isdir(arguments.output_dir):
        checkpoint = get_last_checkpoint(arguments.output_dir)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", {"train_loss": result.training_loss})
    trainer.save_state()


if __name__ == "__main__":
    main()
