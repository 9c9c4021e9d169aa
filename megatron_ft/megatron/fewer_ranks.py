"""Numbers of ranks with which Megatron's command could continue, and reasons against it.

A checkpoint of Megatron's own (torch_dist) loads into another data-parallel size.  The weights
always do; the distributed optimizer's state in Megatron's default layout (``dp_reshardable``,
distrib_optimizer.py of 0.19.2) only while the gradient buckets stay what they were.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_ft.checkpoint.export import CheckpointForm
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.identity import RankRule

SAME_BUCKETS_RANKS = 40
"""Most data-parallel ranks for which the default size of a gradient bucket is the same:
max(40000000, 1000000 * ranks) elements (distributed_data_parallel.py)."""

_WITHOUT = (
    ("finetune", "--finetune", "it would begin at iteration 0 again"),
    ("no_load_optim", "--no-load-optim", "the optimizer would begin anew"),
    ("no_save_optim", "--no-save-optim", "the export would have no optimizer"),
    ("no_load_rng", "--no-load-rng", "random states would begin anew"),
    ("no_save_rng", "--no-save-rng", "the export would have no random states"),
    ("ckpt_step", "--ckpt-step", "it would load that checkpoint and not the export"),
    ("override_ckpt_iteration", "--override-ckpt-iteration", "the export has its own iteration"),
    ("pretrained_checkpoint", "--pretrained-checkpoint", "it makes a missing export a fine-tuning"),
    ("step_batch_size_schedule", "--step-batch-size-schedule", "its batches are not known here"),
)


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


def refusals(args: Any, export_dir: Path | None) -> list[str]:
    """Every reason why a job with these arguments could not continue with fewer ranks, one a line.

    ``export_dir`` is where exports come to lie.
    """
    label = "--inmem-on-no-spare shrink with"
    found = [f"{label} {flag}: {why}" for name, flag, why in _WITHOUT if _given(args, name)]
    load = getattr(args, "load", None)
    if not load or export_dir is None or Path(load).resolve() != export_dir.resolve():
        found.append(
            f"{label} --load {load}: give --load {export_dir}, the folder of "
            "--inmem-drain-export-dir; it may be that of --save, too"
        )
    if getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        found.append(f"{label} --ckpt-format {args.ckpt_format}: exports are torch_dist")
    if not _batch_is_given(args):
        found.append(f"{label}out --global-batch-size: it would follow the number of ranks")
    if getattr(args, "data_parallel_random_init", False) and args.context_parallel_size > 1:
        found.append(f"{label} --data-parallel-random-init and context parallelism: no export")
    if _buckets_follow_ranks(args):
        found.append(
            f"{label} more than {SAME_BUCKETS_RANKS} data-parallel ranks: the optimizer's state "
            "is saved by gradient buckets, whose size follows their number: add "
            "--dist-ckpt-optim-fully-reshardable, or --ddp-bucket-size"
        )
    return found


def _given(args: Any, name: str) -> bool:
    # Not its truth: 0 is an iteration, too.
    value = getattr(args, name, None)
    return value is not None and value is not False


def require_export(form: bytes) -> None:
    """ConfigError if a snapshot with this form could not be exported."""
    problem = CheckpointForm.from_bytes(form).problem
    if problem:
        raise ConfigError(
            "--inmem-on-no-spare shrink continues from an export, and snapshots of this model "
            f"cannot be exported: {problem}. Take stop, or hold under Slurm"
        )


def _batch_is_given(args: Any) -> bool:
    """True if the user chose the global batch size; releases before 0.19 do not remember it."""
    default = bool(args.global_batch_size != args.micro_batch_size * args.data_parallel_size)
    return bool(getattr(args, "_is_global_batch_size_explicitly_specified", default))


def _buckets_follow_ranks(args: Any) -> bool:
    sharded = getattr(args, "use_distributed_optimizer", False)
    if not sharded or getattr(args, "dist_ckpt_optim_fully_reshardable", False):
        return False
    fixed = getattr(args, "ddp_bucket_size", None) or getattr(args, "ddp_num_buckets", None)
    if fixed or not getattr(args, "overlap_grad_reduce", False):
        return False
    return bool(args.data_parallel_size * args.context_parallel_size > SAME_BUCKETS_RANKS)
