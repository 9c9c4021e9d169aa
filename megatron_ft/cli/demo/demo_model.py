"""Flags of a small GPT that trains on two cores and still learns, for the demo and the tests."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.cli.demo.stdlib_corpus import VOCABULARY_SIZE

ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Variables that every rank needs; without OMP_NUM_THREADS, ranks fight for the cores."""

HEADS = 4
VOCABULARY_UNIT = 32

# An empty split makes Megatron count epochs for ever; the default of --eval-interval makes
# Megatron 0.19 fail, even with no evaluation.
_FIXED = (
    f"--num-attention-heads {HEADS} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    "--clip-grad 1.0 --attention-dropout 0.1 --hidden-dropout 0.1 --seed 1234 --split 100,0,0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY_SIZE} "
    f"--make-vocab-size-divisible-by {VOCABULARY_UNIT} --num-workers 0 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000"
).split()

_HOST_ONLY = (
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization "
    "--attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"
).split()


def demo_arguments(
    tp: int = 1,
    pp: int = 1,
    iterations: int = 40,
    data_path: Path | str = "",
    *,
    layers: int = 2,
    hidden: int = 128,
    sequence: int = 64,
    micro_batch: int = 2,
    global_batch: int = 8,
    distributed_optimizer: bool = True,
    precision: str = "bf16",
    cache_path: Path | str | None = None,
) -> list[str]:
    """Megatron flags for a run on host memory over gloo, with dropout on.

    ``data_path`` is a corpus prefix (see :mod:`megatron_ft.cli.demo.stdlib_corpus`);
    ``cache_path`` is where Megatron keeps its sample indices (default: beside the corpus).
    ``precision`` is ``bf16``, ``fp16`` or ``fp32``.  ``global_batch`` must be divisible by
    ``micro_batch`` times the number of data-parallel ranks.  The data-parallel size follows
    from the number of processes.
    """
    flags: dict[str, object] = {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "num-layers": layers,
        "hidden-size": hidden,
        "seq-length": sequence,
        "max-position-embeddings": sequence,
        "micro-batch-size": micro_batch,
        "global-batch-size": global_batch,
        "train-iters": iterations,
        "lr-decay-iters": iterations,
        "data-path": data_path,
    }
    if cache_path is not None:
        flags["data-cache-path"] = cache_path
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    arguments += [*_FIXED, *_HOST_ONLY]
    if distributed_optimizer:
        arguments.append("--use-distributed-optimizer")
    if precision != "fp32":
        arguments.append(f"--{precision}")
    return arguments
