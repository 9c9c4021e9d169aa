"""Load shards of a drained checkpoint into a node's arenas: ``python -m
megatron_ft.checkpoint.load``.

A short-lived process, one on each node that lacks shards.  To its SMP it is an encoder
world of its own: it is watched and fenced as one, and what it has not finished when it
dies is free again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import ArenaCapacityError, Bytes
from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.manifest import Manifest
from megatron_ft.checkpoint.reader import ShardReader, open_shard, read_manifest
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import (
    CheckpointDamagedError,
    ControlPlaneError,
    DrainError,
    MegatronFTError,
    error_class,
)
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.smp.store import SUFFIX

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_DAMAGED = 3
"""Exit status when the checkpoint is at fault: another one has to be taken."""

ANSWER_SECONDS = 60.0


class LoadPlan(msgspec.Struct, frozen=True):
    """What one node loads: these shards of one checkpoint, as the world of this name."""

    folder: Path
    snapshot: SnapshotId
    shards: tuple[str, ...]
    world: str

    def to_json(self) -> str:
        """The process's argument."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls, text: str) -> LoadPlan:
        """The plan back."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


def main(arguments: Sequence[str] | None = None) -> int:
    """Load.  Exit codes: 0 done, 1 failed, 3 the checkpoint is damaged; the last line says why."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.checkpoint.load")
    parser.add_argument("step", choices=["load"])
    parser.add_argument("plan", type=LoadPlan.from_json)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        load(options.plan, ProcessEnvironment.from_env())
    except CheckpointDamagedError as error:
        log.error("%s", error)
        return EXIT_DAMAGED
    except (MegatronFTError, OSError) as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0


def load(plan: LoadPlan, environment: ProcessEnvironment, disk: Disk | None = None) -> None:
    """Fill the slot that waits for each shard, and say so to the SMP of this node."""
    # Before anything is mapped: who may write must be known to who fences writers.
    _tell(environment, m.EncoderHello(os.getpid(), plan.world, 0, 1, environment.incarnation))
    manifest = read_manifest(plan.folder)
    if manifest.snapshot != plan.snapshot:
        raise CheckpointDamagedError(f"{plan.folder} is of snapshot {manifest.snapshot}")
    for shard_id in plan.shards:
        path = environment.node_dir / f"{shard_id}{SUFFIX}"
        record = fill(path, plan.folder, shard_id, manifest, disk)
        _tell(environment, m.Loaded(plan.world, record))
        log.info("loaded %d bytes of %s from %s", record.used_bytes, shard_id, plan.folder)


def fill(
    path: Path, folder: Path, shard_id: str, manifest: Manifest, disk: Disk | None = None
) -> SealedRecord:
    """Copy one shard into the slot of its arena that waits for it; the record of what is there.

    Every byte is checked after it was copied.  CheckpointDamagedError names what is wrong
    with the file; DrainError if the arena is not one that can take it.  Where the arena has
    digests of other blocks, or by another algorithm, they are made anew.
    """
    with Arena.open(path) as arena, open_shard(folder, shard_id, manifest, disk) as reader:
        data = arena.data(_waiting_slot(arena, manifest.snapshot), writable=True)
        here = (arena.geometry.block_bytes, arena.header.digest_algorithm)
        if here == (reader.header.block_bytes, reader.header.digest_algorithm):
            return _as_it_is(reader, data, path)
        try:
            return reader.read_sealed_anew(data, *here)
        except ArenaCapacityError as error:
            raise DrainError(f"{reader.path} does not fit into {path}: {error}") from error


def _as_it_is(reader: ShardReader, data: Bytes, path: Path) -> SealedRecord:
    used = reader.record.used_bytes
    if used > data.size:
        raise DrainError(f"{path} has room for {data.size} bytes, {reader.path} holds {used}")
    reader.read_into(data[:used])
    # Parity is computed over the whole slot, and there may be an older snapshot behind it.
    data[used:] = 0
    return reader.record


def _waiting_slot(arena: Arena, snapshot: SnapshotId) -> int:
    for slot in range(arena.geometry.slot_count):
        header = arena.slot(slot)
        if (header.state, header.snapshot) == (SlotState.REBUILDING, snapshot):
            return slot
    raise DrainError(f"no slot of {arena.path} waits for snapshot {snapshot}")


def _tell(environment: ProcessEnvironment, message: m.Message) -> None:
    answer: Any = ask(environment.socket, message, ANSWER_SECONDS)
    if isinstance(answer, m.Refused):
        raise error_class(answer.error)(answer.reason)
    if not isinstance(answer, m.Ok | m.EncoderWelcome):
        raise ControlPlaneError(f"the SMP answered {type(answer).__name__} to a loader")


if __name__ == "__main__":
    sys.exit(main())
