"""Numbers of ranks with which Megatron's command could continue, and reasons against it."""

from __future__ import annotations

import math
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
    label, found = "--inmem-on-no-spare shrink with", []
    if not _batch_is_given(args):
        found.append(f"{label}out --global-batch-size: it would follow the number of ranks")
    if getattr(args, "step_batch_size_schedule", None) is not None:
        found.append(f"{label} --step-batch-size-schedule: its batches are not known here")
    return found


def _batch_is_given(args: Any) -> bool:
    """True if the user chose the global batch size; releases before 0.19 do not remember it."""
    default = bool(args.global_batch_size != args.micro_batch_size * args.data_parallel_size)
    return bool(getattr(args, "_is_global_batch_size_explicitly_specified", default))
