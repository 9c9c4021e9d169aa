"""Count a real job's messages and bytes at its coordinator, on virtual nodes of this machine."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import uuid
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.scale.tally import EVENTS, Tally, kind_of
from megatron_ft.cli.chaos.runner import TRAINING_MODULE
from megatron_ft.cli.run_command import RunCommand
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.event_stream import reported
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.smp_link import SmpLink
from megatron_ft.supervisor.supervisor import Supervisor
from tests.support.chaos_cluster import EquippedCluster
from tests.support.warm_host import WarmHost, warm

LIMIT_SECONDS = 400.0
SNAPSHOTS = 5
"""So many are waited for; of the later ones that with the fewest messages counts.

An SMP tells twice what a heartbeat has not named in time, as on a busy machine.
"""


class Count(msgspec.Struct, frozen=True):
    """One snapshot of a job of so many nodes, each with one rank."""

    nodes: int
    messages: int
    length: int
    encoder_bytes: int
    shard_bytes: int
    block_bytes: int
    kinds: dict[str, tuple[int, int]]


class CountingLink(SmpLink):
    """A link that notes what belongs to a snapshot; ``tallies`` is shared by all links."""

    tallies: defaultdict[SnapshotId, Tally] = defaultdict(Tally)
    sent: defaultdict[SnapshotId, list[int]] = defaultdict(list)
    committed: list[SnapshotId] = []  # noqa: RUF012

    async def ask(self, request: m.Message, timeout: float) -> Any:
        """Note request and answer."""
        answer = await super().ask(request, timeout)
        if isinstance(request, m.Grant | m.Encode | m.Commit | m.Abort):
            kind, tally = type(request).__name__, self.tallies[request.snapshot]
            tally.note(kind, m.encode(request))
            tally.note(f"{kind} answer", m.encode(answer))
        return answer

    def receive(self, message: m.NodeEvent) -> None:
        """Count the message, then hand its events on."""
        bodies: list[Any] = [one.body for one in reported(message)]
        last: Any = bodies[-1]
        if isinstance(last, EVENTS):
            snapshot = last.record.snapshot if isinstance(last, m.Sealed) else last.snapshot
            self.tallies[snapshot].note(kind_of(message), m.encode(message))
            encoded = (body for body in bodies if isinstance(body, m.Encoded))
            self.sent[snapshot] += [body.bytes_sent for body in encoded]
        super().receive(message)


def count(nodes: int, protect: str, host: str = "") -> Count:
    """Run a job until it has committed a few snapshots; what the last one has cost."""
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        return asyncio.run(asyncio.wait_for(_count(nodes, protect, host, folder), LIMIT_SECONDS))


async def _count(nodes: int, protect: str, host: str, folder: str) -> Count:
    CountingLink.tallies.clear()
    CountingLink.sent.clear()
    name = f"scale-{uuid.uuid4().hex[:8]}"
    python = warm(host, ()) if host else [sys.executable]
    training = (*python, "-m", TRAINING_MODULE, "--iterations", "1000000", "--seconds", "0.05")
    flags = {
        "--job": name, "--nodes": nodes, "--protect": protect, "--lease-seconds": 60,
        "--transport": "tcp", "--slots": 2, "--warm-start": "off",
        "--state-dir": Path(folder, "state"), "--log-dir": Path(folder, "logs"),
    }  # fmt: skip
    job = RunCommand(flags, training)
    cluster = EquippedCluster(name, job.node_names, warm_path=host)
    try:
        with JobState(job.notes, name) as state:
            # Small blocks, for a shard of some kilobytes.
            supervisor = Supervisor(replace(job.spec, block_bytes=16384), cluster, state)
            supervisor.fleet.link_type = CountingLink
            run = asyncio.create_task(supervisor.run())
            snapshots = await _committed(supervisor, run)
            assert supervisor.pump.cycle is not None
            stripe = supervisor.pump.cycle.stripes[0]
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
    finally:
        cluster.destroy()
    snapshot = min(snapshots[1:], key=lambda one: CountingLink.tallies[one].messages)
    tally, sent = CountingLink.tallies[snapshot], CountingLink.sent[snapshot]
    return Count(
        nodes, tally.messages, tally.length, max(sent), stripe.data_bytes, stripe.block_bytes,
        dict(tally.kinds),
    )  # fmt: skip


async def _committed(supervisor: Supervisor, run: asyncio.Task[Any]) -> list[SnapshotId]:
    """A few protected snapshots, once the last message of the newest was noted."""
    seen: list[SnapshotId] = []
    while len(seen) < SNAPSHOTS:
        if run.done():
            run.result()
            raise RuntimeError("the job ended before it had committed enough")
        protected = supervisor.standing.protected
        if protected is not None and protected[0] not in seen:
            seen.append(protected[0])
        await asyncio.sleep(0.02)
    await asyncio.sleep(1.0)  # events beside the protocol, as CaptureCost, may come after it
    return seen


def count_all(sizes: tuple[int, ...], protect: str) -> list[Count]:
    """Jobs of these sizes, one after the other; their processes are forked from one server."""
    host = WarmHost()
    try:
        return [count(nodes, protect, host.path) for nodes in sizes]
    finally:
        host.close()
