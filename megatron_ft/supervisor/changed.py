"""Flags of a resumed job that do not fit what it keeps in memory: refused before training."""

from __future__ import annotations

from collections.abc import Collection

from megatron_ft.checkpoint.decide import Decision
from megatron_ft.core.errors import ConfigError, LayoutMismatchError
from megatron_ft.core.identity import SHRINK
from megatron_ft.supervisor.job_state import JobRecord
from megatron_ft.supervisor.spec import JobSpec


def check_nodes(spec: JobSpec, record: JobRecord) -> None:
    """ConfigError or LayoutMismatchError if a job is kept with other nodes or ranks than asked for.

    One that has shrunk is asked for with the number that it began with.
    """
    kept = len(record.active)
    shrunk = spec.settings.on_no_spare == SHRINK and kept < spec.nodes
    if kept and kept != spec.nodes and not shrunk:
        free = "" if record.committed else ", or free it: `megatron-ft clean --job {spec.name}`"
        raise ConfigError(
            f"job {spec.name!r} is kept with {kept} nodes; you asked for {spec.nodes}. Use --nodes "
            f"{kept}, or another --job{free.format(spec=spec)}"
        )
    ranks = (kept or spec.nodes) * spec.ranks_per_node
    if record.committed and record.shards and len(record.shards) != ranks:
        raise LayoutMismatchError(
            f"job {spec.name!r} keeps snapshots of {len(record.shards)} ranks in memory; you asked "
            f"for {ranks}. {_other_shape(spec.name)}"
        )


def check_memory(spec: JobSpec, record: JobRecord, memory: Decision) -> None:
    """ConfigError if memory serves a snapshot whose arenas were made by other settings."""
    if memory.snapshot is None:
        return
    slots = {len(holding.arena.slots) for holding in memory.holdings.values()}
    wanted = spec.settings.slots
    if record.scheme and record.scheme != str(spec.scheme):
        _refuse(spec.name, "protect", record.scheme, str(spec.scheme))
    if slots != {wanted}:
        _refuse(spec.name, "slots", str(max(slots - {wanted})), str(wanted))


def check_shard(job: str, known: Collection[str], shard_id: str) -> None:
    """LayoutMismatchError if a rank brings a shard that the job's snapshots do not have."""
    if known and shard_id not in known:
        raise LayoutMismatchError(
            f"the snapshots of job {job!r} have no shard {shard_id}, which a rank brings: they "
            f"were taken with another parallel shape. {_other_shape(job)}"
        )


def _refuse(job: str, flag: str, kept: str, wanted: str) -> None:
    raise ConfigError(
        f"job {job!r} keeps its snapshots in memory with --{flag} {kept}; you asked for {wanted}. "
        f"Run it again with --{flag} {kept}. To change it, write the snapshot to disk, "
        f"`megatron-ft drain --job {job} --to DIR`, and start a job of another name from there: "
        f"`megatron-ft run --job NAME --{flag} {wanted} --restore-from DIR ...`"
    )


def _other_shape(job: str) -> str:
    return (
        "Run it with the old shape. To change the shape, write a checkpoint of the framework, "
        f"`megatron-ft export --job {job} --to DIR`, and start a job of another name from it: "
        "`megatron-ft run --job NAME ...` with --load DIR in Megatron's flags, or "
        "load_checkpoint(DIR) with DeepSpeed"
    )
