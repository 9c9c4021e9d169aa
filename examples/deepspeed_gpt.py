r"""Pretrain a small byte-level GPT with DeepSpeed; everything else is in the JSON.

    deepspeed examples/deepspeed_gpt.py --deepspeed_config ds_config.json --steps 200

The text is any file (default: the Python standard library's own sources), one token a byte.
``--pipeline N`` cuts the model into N stages.  The script loads the newest checkpoint at its
start, if there is one, and trains until the engine has counted ``--steps`` steps.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from megatron_ft import run_resilient

VOCABULARY = 256


def arguments() -> argparse.Namespace:
    """The command line; the launcher and DeepSpeed add their own flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of the optimizer in all")
    parser.add_argument("--text", type=Path, help="file to train on")
    parser.add_argument("--sequence", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="divisible by the heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--pipeline", type=int, default=0, metavar="STAGES")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-interval", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Samples of ``sequence`` bytes and the bytes that follow each, cut from a text in order."""

    def __init__(self, text: bytes, sequence: int) -> None:
        self.bytes, self.sequence = torch.frombuffer(bytearray(text), dtype=torch.uint8), sequence

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence
        piece = self.bytes[start : start + self.sequence + 1].long()
        return piece[:-1], piece[1:]


def read_text(path: Path | None) -> bytes:
    """The file, or the sources of the Python standard library."""
    if path is not None:
        return path.read_bytes()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\0".join(source.read_bytes() for source in sources)


class Embedding(nn.Module):
    """Bytes (batch, sequence) to vectors (batch, sequence, hidden), with learned positions."""

    def __init__(self, sequence: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and around a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        x = x + self._drop(self.out(self._attend(self.norm_attention(x))))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm_mlp(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        shape = (batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, hidden)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """Vectors (batch, sequence, hidden) to scores (batch, sequence, VOCABULARY)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.scores(self.norm(x))


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy a byte, in nats."""
    return functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    """All layers in one module, whose output is the loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        return loss_of(self.layers(tokens), labels)


def set_seed(seed: int) -> None:
    """Seed every generator that a program like this draws from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def build_model(options: argparse.Namespace) -> nn.Module:
    """The model, whole or in stages."""
    hidden, dropout = options.hidden, options.dropout
    blocks = [Block(hidden, options.heads, dropout) for _ in range(options.layers)]
    layers = [Embedding(options.sequence, hidden, dropout), *blocks, Head(hidden)]
    if options.pipeline:
        return PipelineModule(layers=layers, num_stages=options.pipeline, loss_fn=loss_of)
    return GPT(layers)


def train_step(engine: Any, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """One step of the optimizer; the loss of its last micro-batch."""
    for _ in range(engine.gradient_accumulation_steps()):
        tokens, labels = (part.to(engine.device) for part in next(batches))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
    return loss.item()


def main() -> None:
    """Train."""
    options = arguments()
    deepspeed.init_distributed()
    set_seed(options.seed)
    model = build_model(options)
    text = Text(read_text(options.text), options.sequence)
    engine, _, loader, _ = deepspeed.initialize(args=options, model=model, training_data=text)
    set_seed(options.seed + deepspeed.comm.get_rank())  # other dropout on each rank
    engine.load_checkpoint(str(options.checkpoints))
    batches = None if options.pipeline else iter(RepeatingLoader(loader))
    while engine.global_steps < options.steps:
        loss = engine.train_batch() if batches is None else train_step(engine, batches)
        if deepspeed.comm.get_rank() == 0:
            print(f"step {engine.global_steps}: loss {float(loss):.4f}", flush=True)
        if options.save_interval and engine.global_steps % options.save_interval == 0:
            engine.save_checkpoint(str(options.checkpoints))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    # Called again in the same process when another rank of a megatron-ft job has failed.
    run_resilient(main)
