"""Numbers of ranks with which Megatron's command could continue, and reasons against it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.identity import RankRule


def rule_of(args: Any) -> RankRule:
    """Numbers of ranks that these arguments, as Megatron has validated them, work with.

    A model takes tp * pp * cp ranks, experts etp * ep * pp; the batches of training, of its
    ramp-up and of evaluation must be multiples of micro-batch times data-parallel size, and the
    interleaved pipeline wants a multiple of its length in micro-batches.
    """
    pipeline = args.pipeline_model_parallel_size
    replica = args.tensor_model_parallel_size * pipeline * args.context_parallel_size
    instances = getattr(args, "num_distributed_optimizer_instances", None) or 1
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None)
    experts = (expert_tensor or args.tensor_model_parallel_size) * pipeline
    experts *= getattr(args, "expert_model_parallel_size", None) or 1
    multiple = math.lcm(replica * instances, experts if getattr(args, "num_experts", None) else 1)
    unit = pipeline if getattr(args, "virtual_pipeline_model_parallel_size", None) else 1
    return RankRule(multiple, replica, max(1, _micro_batches(args) // unit))


def _micro_batches(args: Any) -> int:
    micro: int = args.micro_batch_size
    ramp = [int(size) for size in (getattr(args, "rampup_batch_size", None) or ())[:2]]
    training = math.gcd(args.global_batch_size, *ramp) // micro
    evaluated = getattr(args, "eval_global_batch_size", None)
    if not evaluated:
        return training
    return math.gcd(training, evaluated // (getattr(args, "eval_micro_batch_size", None) or micro))


def refusals(args: Any) -> list[str]:
    """Every reason why a job with these arguments could not continue with fewer ranks, one a line.

    The global batch must stay what it is.
    """
    label, found = "--inmem-on-no-spare shrink or auto with", []
    if not _batch_is_given(args):
        found.append(f"{label}out --global-batch-size: it would follow the number of ranks")
    if getattr(args, "step_batch_size_schedule", None) is not None:
        found.append(f"{label} --step-batch-size-schedule: its batches are not known here")
    return found


def _batch_is_given(args: Any) -> bool:
    """True if the user chose the global batch size; releases before 0.19 do not remember it."""
    known = getattr(args, "_is_global_batch_size_explicitly_specified", None)
    if known is None:
        return bool(args.global_batch_size != args.micro_batch_size * args.data_parallel_size)
    return bool(known)


_SIZES = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "num-distributed-optimizer-instances",
)
_NUMBERS = (
    "micro-batch-size",
    "global-batch-size",
    "expert-tensor-parallel-size",
    "num-experts",
    "eval-global-batch-size",
    "eval-micro-batch-size",
    "num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
)
# Megatron derives sizes from these, or from files that they name.
_DERIVED = (
    "yaml-cfg",
    "use-checkpoint-args",
    "pipeline-model-parallel-layout",
    "hybrid-layer-pattern",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)


def arguments_of(command: Sequence[str]) -> argparse.Namespace | None:
    """Megatron's arguments in a command line, for ``rule_of`` and ``refusals``.

    None if only the ranks can say: flags are missing, or Megatron derives sizes from others.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--step-batch-size-schedule")
    flags = {part.partition("=")[0] for part in command}
    if flags & {f"--{name}" for name in _DERIVED}:
        return None
    try:
        args, _ = parser.parse_known_args([part for part in command if part != "--"])
    except argparse.ArgumentError:
        return None
    if not args.micro_batch_size:
        return None
    stages, layers = args.num_virtual_stages_per_pipeline_rank, args.num_layers or 0
    if stages is None and (per_stage := args.num_layers_per_virtual_pipeline_stage):
        stages = layers // args.pipeline_model_parallel_size // per_stage
    args.virtual_pipeline_model_parallel_size = stages if (stages or 0) > 1 else None
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    return args
