"""The SMP as a real process: adoption, fencing, leases, authentication, limits."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.cli.main import main
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import LayoutMismatchError, PinnedError, StaleIncarnationError
from megatron_ft.core.identity import Ancestor
from megatron_ft.core.private_files import spare_of
from megatron_ft.rpc import client as client_module
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.sockets import JobKeys, Peer, Server
from megatron_ft.smp import local_server
from megatron_ft.smp.local_server import LocalServer
from megatron_ft.smp.service import SIGTERM_REASON, SmpService
from megatron_ft.supervisor.smp_link import SmpLink
from tests.support.smp_node import SECRET, SmpNode, capture, create, run, say, snapshot

PEERS = Path(__file__).parents[2] / "programs" / "smp_peers.py"
STARTED: list[subprocess.Popen[str]] = []
"""By process() in this test."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmpNode]:
    node = SmpNode(tmp_path)
    node.start()
    yield node
    node.kill()
    for one in STARTED:
        one.kill()
        one.communicate()
    STARTED.clear()


def trainer(node: SmpNode, incarnation: int = 1) -> subprocess.Popen[str]:
    return process(node, "trainer", incarnation=incarnation)


def encoder(
    node: SmpNode, world: str, value: int, *, held: bool = False, incarnation: int = 1
) -> subprocess.Popen[str]:
    """Registers for ``world`` and, with a line of input, fills the parity of slot 0.

    One that is ``held`` says so, and registers with a line of input before that.
    """
    words = [str(node.environment.node_dir / "dp0.arena"), world, str(value)]
    return process(node, "encoder", *words, *["held"] * held, incarnation=incarnation)


def say_go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()


async def next_line(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    return await asyncio.wait_for(asyncio.to_thread(writer.stdout.readline), 60)


def process(
    node: SmpNode, name: str, *words: str, incarnation: int = 1, through: Sequence[str] = ()
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **node.environment.variables(),
        "MEGATRON_FT_INCARNATION": str(incarnation),
    }
    started = subprocess.Popen(
        [*through, sys.executable, str(PEERS), name, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    STARTED.append(started)
    return started


async def led(node: SmpNode, incarnation: int = 1, seconds: float = 60.0) -> SmpLink:
    """A link whose coordinator has been admitted and holds the lease."""
    link = await node.link(zmq.asyncio.Context.instance())
    await link.demand(m.Admit(incarnation, seconds), 30)
    await lease(link, seconds, incarnation)
    return link


async def lease(link: SmpLink, seconds: float, incarnation: int = 1) -> m.LeaseAnswer:
    """Have the lease end so many seconds from now."""
    first = await link.demand(m.Lease(incarnation, seconds), 30)
    answer = await link.demand(m.Lease(incarnation, seconds, first.clock), 30)
    assert isinstance(answer, m.LeaseAnswer)
    return answer


async def test_who_registers_before_the_coordinator_is_here_is_told_of(node: SmpNode) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    link.close()
    node.kill()
    node.start()
    assert "EncoderWelcome" in await next_line(encoder(node, "w1", 7))
    link = await node.link(zmq.asyncio.Context.instance())
    await lease(link, 60.0)
    assert (await node.event(m.EncoderHello)).world == "w1"
    link.close()


async def test_an_encoder_that_was_started_ahead_waits_for_its_incarnation(node: SmpNode) -> None:
    """It is registered with it, and not if it has died meanwhile."""
    link = await led(node)
    await link.demand(create(), 30)
    dead, early = (encoder(node, name, 7, incarnation=2) for name in ("w1", "w2"))
    assert {(await node.event(m.EncoderWaits)).world for _ in range(2)} == {"w1", "w2"}
    dead.kill()
    dead.wait(30)
    await link.demand(m.Admit(2, 60.0), 30)
    assert "EncoderWelcome" in await next_line(early)
    assert (await node.event(m.EncoderHello)).world == "w2"
    assert (await lease(link, 60.0, 2)).encoder_world == "w2"
    link.close()


async def test_a_rank_that_dies_once_it_is_restored_was_restored(node: SmpNode) -> None:
    """Its failure is held against the snapshot only if the coordinator knows of the load."""
    link = await led(node)
    rank = process(node, "restored")
    assert await asyncio.to_thread(rank.wait, 60) == -signal.SIGKILL
    assert (await node.event(m.Restored)).shard_id == "dp0"
    link.close()


def test_a_rank_trains_though_nobody_notes_that_it_was_restored(
    node: SmpNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "NOTED_TIMEOUT_SECONDS", 0.1)
    run(node.endpoint())
    client = client_module.TrainerClient(node.environment, 0)
    client.shard_id = "dp0"
    assert node.process is not None
    os.kill(node.process.pid, signal.SIGSTOP)
    client.restored(snapshot(1))
    client.close()
    assert "has not confirmed in 0 s that dp0 was restored" in caplog.text


async def test_a_killed_smp_leaves_arenas_that_the_next_one_adopts(node: SmpNode) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    await link.demand(m.Grant(1, snapshot(1), 2), 30)
    say(node, capture(node))
    assert (await node.event(m.Sealed)).record.snapshot == snapshot(1)
    await link.demand(m.Commit(1, snapshot(1), "local"), 30)
    link.close()
    node.kill()
    node.start()
    link = await node.link(zmq.asyncio.Context.instance())
    with pytest.raises(StaleIncarnationError):
        await link.demand(m.Admit(1, 60.0), 30)
    inventory = await link.demand(m.Admit(2, 60.0), 30)
    assert inventory.highest_incarnation == 1
    (arena,) = inventory.arenas
    assert [s.state for s in arena.slots] == [SlotState.COMMITTED, SlotState.FREE]
    assert arena.slots[0].record is not None and arena.slots[0].iteration == 2
    link.close()


async def test_an_older_trainer_is_dead_before_a_new_incarnation_is_admitted(node: SmpNode) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    old = trainer(node)
    await node.event(m.Hello)
    await link.demand(m.Grant(1, snapshot(1), 2), 30)
    os.kill(old.pid, signal.SIGSTOP)
    inventory = await link.demand(m.Admit(2, 60.0), 30)
    assert old.poll() == -signal.SIGKILL
    assert [s.state for s in inventory.arenas[0].slots] == [SlotState.FREE, SlotState.FREE]
    link.close()


async def test_an_encoder_of_an_old_world_writes_nothing_when_it_wakes(node: SmpNode) -> None:
    """Its order was carried out by another world meanwhile, or its slot has a newer snapshot."""
    striped = {"codec": "replica", "parity_members": 1, "members": ("dp0", "dp1")}
    link = await led(node)
    await link.demand(msgspec.structs.replace(create(), **striped), 30)
    old = encoder(node, "old", 7)
    assert "EncoderWelcome" in await next_line(old)
    os.kill(old.pid, signal.SIGSTOP)
    say_go(old)
    new = encoder(node, "new", 9)
    assert "EncoderWelcome" in await next_line(new)
    say_go(new)
    assert await next_line(new) == "wrote\n"
    os.kill(old.pid, signal.SIGCONT)
    await next_line(old)  # until it has written, or is dead
    with Arena.open(node.environment.node_dir / "dp0.arena") as arena:
        assert set(arena.parity(0).tolist()) == {9}, "parity of an old world over a newer one"
    link.close()


@pytest.mark.parametrize(
    "earlier", [False, True], ids=["of this incarnation", "of an earlier incarnation"]
)
async def test_an_encoder_of_an_old_world_that_comes_late_does_not_end_the_new_one(
    node: SmpNode, earlier: bool
) -> None:
    """It was suspended before it said hello, or where nobody could reach it."""
    link = await led(node, 2)
    await link.demand(create(incarnation=2), 30)
    old = encoder(node, "old", 7, held=True, incarnation=1 if earlier else 2)
    assert await next_line(old) == "held\n"
    new = encoder(node, "new", 9, incarnation=2)
    assert "EncoderWelcome" in await next_line(new)
    say_go(old)
    assert "StaleIncarnationError" in await next_line(old)
    assert new.poll() is None and (await lease(link, 60.0, 2)).encoder_world == "new"
    link.close()


async def test_an_encoder_that_cannot_be_written_down_is_told_of_with_the_cause(
    node: SmpNode,
) -> None:
    """As on a tmpfs that is full."""
    link = await led(node)
    await link.demand(create(), 30)
    spare = spare_of(node.environment.node_dir / "writers.json")
    spare.unlink()
    (spare / "in the way").mkdir(parents=True)
    encoder(node, "w1", 7)
    told = await node.event(m.EncoderRefused)
    assert told.world == "w1" and "writers.json" in told.reason
    link.close()


async def test_an_encoder_of_an_earlier_incarnation_is_turned_away_where_there_is_no_other(
    node: SmpNode,
) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    old = encoder(node, "old", 7, held=True)
    assert await next_line(old) == "held\n"
    await link.demand(m.Admit(2, 60.0), 30)
    say_go(old)
    assert "StaleIncarnationError" in await next_line(old)
    assert (await lease(link, 60.0, 2)).encoder_world == ""
    link.close()


async def test_a_trainer_of_an_earlier_incarnation_is_turned_away(node: SmpNode) -> None:
    link = await led(node, incarnation=2)
    said = await next_line(trainer(node, incarnation=1))
    assert said.startswith("StaleIncarnationError trainer of incarnation 1")
    link.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
async def test_a_trainer_with_process_numbers_of_its_own_is_turned_away(node: SmpNode) -> None:
    """Its number is another process's here, which the next fence would kill."""
    link = await led(node)
    own_numbers = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    said = await next_line(process(node, "trainer", through=own_numbers))
    assert said.startswith("ControlPlaneError the trainer of dp0") and "--pid host" in said
    link.close()


async def test_a_shard_missing_from_a_restore_is_refused(node: SmpNode) -> None:
    """It must never start from nothing beside ranks that were restored."""
    link = await led(node)
    await link.demand(create(), 30)
    await link.demand(m.RestoreReady(1, snapshot(5), {}), 30)
    said = await next_line(trainer(node))
    assert said.startswith("LayoutMismatchError the job restores snapshot 1.5")
    link.close()


async def test_a_restarted_smp_says_nothing_of_what_is_restored_before_it_was_told(
    node: SmpNode,
) -> None:
    """An empty welcome would start this rank from nothing beside restored ones."""
    (await led(node)).close()
    node.kill()
    node.start()
    link = await node.link(zmq.asyncio.Context.instance())
    await link.demand(m.Lease(1, 60.0), 30)
    rank = trainer(node)
    assert rank.stdout is not None
    await node.event(m.Hello)
    await link.demand(m.Lease(1, 60.0), 30)
    early = select.select([rank.stdout], [], [], 0.5)[0]
    assert not early, f"not told, the SMP said {rank.stdout.readline()}"
    await link.demand(m.RestoreReady(1, snapshot(5), {}), 30)
    said = await next_line(rank)
    assert said.startswith("LayoutMismatchError the job restores snapshot 1.5")
    link.close()


async def test_an_smp_that_is_never_told_what_is_restored_refuses_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "RESTORE_TIMEOUT_SECONDS", 0.01)
    sent: list[m.Message] = []

    async def send(peer: Peer, body: m.Message) -> None:
        sent.append(body)

    tmp_path.chmod(0o700)
    environment = ProcessEnvironment("job", "node0", tmp_path, 1)
    service = SmpService(environment, uuid.UUID(int=7), send, send)
    service.change_state(highest_incarnation=1)
    socket = Server(zmq.asyncio.Context.instance())
    server = LocalServer(service, socket)
    await server._welcome_once_known(b"rank", m.Hello(os.getpid(), 0, 0, "dp0", (), 1))
    socket.socket.close(0)
    (answer,) = sent
    assert isinstance(answer, m.Refused)
    assert "node node0 was restarted and has not learned" in answer.reason


async def test_without_a_lease_the_node_kills_its_own_trainers(node: SmpNode) -> None:
    link = await led(node)
    cut_off = trainer(node)
    await node.event(m.Hello)
    await lease(link, 0.5)
    assert await asyncio.to_thread(cut_off.wait, 60) == -signal.SIGKILL
    link.close()


@pytest.mark.parametrize("heard", ["never", "before"])
async def test_leases_without_new_answers_extend_nothing(node: SmpNode, heard: str) -> None:
    """As they come through a network that is cut in one direction."""
    link = await led(node)
    cut_off = trainer(node)
    await node.event(m.Hello)
    clock = (await lease(link, 1.0)).clock if heard == "before" else 0.0
    if heard == "never":
        await lease(link, 1.0)
    dead = asyncio.create_task(asyncio.to_thread(cut_off.wait, 60))
    while not dead.done():
        await link.demand(m.Lease(1, 1.0, clock), 30)
        assert time.monotonic() < clock + 10 or not clock, "the lease never ends"
        await asyncio.sleep(0.05)
    assert dead.result() == -signal.SIGKILL
    link.close()


@pytest.mark.parametrize("levels", [1, 2])
def test_a_folder_above_that_others_may_change_is_refused(tmp_path: Path, levels: int) -> None:
    node = SmpNode(tmp_path / "root" / "job")
    above = node.environment.node_dir.parents[levels - 1]
    above.mkdir(parents=True)
    node.log = tmp_path / "log"
    above.chmod(0o777)
    node.start()
    assert node.process is not None and node.process.wait(30) == 1
    assert f"{above} has mode 777" in node.log.read_text()
    assert not node.environment.node_dir.exists()


async def test_a_lease_that_counts_from_the_future_extends_nothing(node: SmpNode) -> None:
    first = await led(node)
    ended = await lease(first, 0.0)
    await first.demand(m.Lease(1, 100.0, ended.clock + 1000.0), 30)
    second = await node.link(zmq.asyncio.Context.instance())
    assert isinstance(await second.ask(m.Admit(2, 1.0), 30), m.Inventory)
    first.close()
    second.close()


async def status_of(node: SmpNode) -> m.Status:
    status = await asyncio.to_thread(ask, node.environment.socket, m.StatusRequest())
    assert isinstance(status, m.Status)
    return status


async def test_an_admission_begins_a_lease(node: SmpNode) -> None:
    """Before the first heartbeat nobody else may lead, and no encoder of this incarnation is
    ended."""
    link = await node.link(zmq.asyncio.Context.instance())
    assert isinstance(await link.ask(m.Admit(1, 60.0), 30), m.Inventory)
    link.close()
    assert (await status_of(node)).lease_seconds_left > 0


async def test_a_lease_that_counts_from_before_the_admission_ends_nothing(node: SmpNode) -> None:
    """The coordinator has heard of nobody while old writers were hard to kill."""
    link = await led(node)
    before = (await lease(link, 60.0)).clock
    assert isinstance(await link.ask(m.Admit(2, 60.0), 30), m.Inventory)
    await link.demand(m.Lease(2, 0.0, before), 30)
    link.close()
    assert (await status_of(node)).lease_seconds_left > 0


async def test_an_smp_that_was_restarted_ends_nobody_before_it_has_a_lease(node: SmpNode) -> None:
    """The first heartbeat grants nothing, as nothing was heard of this SMP; it ends nothing."""
    first = await led(node)
    training = trainer(node)
    await node.event(m.Hello)
    first.close()
    node.kill()
    node.start()
    link = await node.link(zmq.asyncio.Context.instance())
    answer = begun = await link.demand(m.Lease(1, 60.0), 30)
    # On the SMP's own clock, by which it looks at its lease ten times a second.
    while answer.clock < begun.clock + 1.0:
        answer = await link.demand(m.Lease(1, 60.0), 30)
        await asyncio.sleep(0.05)
    assert training.poll() is None
    link.close()


ERRAND = """
import sys, time
from megatron_ft.rpc.local_query import register_leased_process
register_leased_process("write")
print("begun", flush=True)
time.sleep(60)
"""


def leased(node: SmpNode, incarnation: int) -> subprocess.Popen[str]:
    environment = replace(node.environment, incarnation=incarnation)
    return subprocess.Popen(
        [sys.executable, "-c", ERRAND],
        env={**os.environ, **environment.variables()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_drains_end_with_the_lease_and_with_their_incarnation(node: SmpNode) -> None:
    link = await led(node)
    first = leased(node, 1)
    assert first.stdout is not None and first.stdout.readline() == "begun\n"
    await lease(link, 0.2)
    assert await asyncio.to_thread(first.wait, 30) == -signal.SIGKILL
    await lease(link, 60.0)
    second, of_no_incarnation = leased(node, 1), leased(node, 0)
    assert second.stdout is not None and second.stdout.readline() == "begun\n"
    await link.demand(m.Admit(2, 60.0), 30)
    assert second.wait(30) == -signal.SIGKILL, "it outlived its incarnation"
    _, said = of_no_incarnation.communicate(timeout=30)
    assert "StaleIncarnationError" in said and of_no_incarnation.returncode == 1
    for process in (first, second):
        process.communicate()
    link.close()


async def test_a_second_coordinator_waits_for_the_lease_of_the_first(node: SmpNode) -> None:
    first = await led(node, seconds=60.0)
    second = await node.link(zmq.asyncio.Context.instance())
    answer = await second.ask(m.Admit(2, 60.0), 30)
    assert isinstance(answer, m.LeaseHeld)
    assert 0 < answer.seconds <= 60
    await lease(first, 0.0)
    assert isinstance(await second.ask(m.Admit(2, 60.0), 30), m.Inventory)
    stale = await first.ask(m.Lease(1, 60.0), 30)
    assert isinstance(stale, m.Refused) and isinstance(stale.error, StaleIncarnationError)
    first.close()
    second.close()


async def test_a_rewind_that_one_coordinator_did_not_live_to_carry_out_reaches_the_next(
    node: SmpNode,
) -> None:
    first = await led(node, seconds=60.0)
    assert ask(node.environment.socket, m.Rewind(7)) == m.Ok()
    await lease(first, 0.0)
    first.close()
    second = await led(node, incarnation=2)
    assert (await second.demand(m.Lease(2, 60.0), 30)).rewind == 7
    await second.demand(m.Admit(3, 60.0), 30)
    assert (await second.demand(m.Lease(3, 60.0), 30)).rewind is None, "it is carried out"
    second.close()


async def test_a_node_that_shall_leave_is_in_every_heartbeat_of_one_coordinator(
    node: SmpNode,
) -> None:
    """By command or by SIGTERM, which ends no SMP; a later coordinator does not know of it."""
    first = await led(node, seconds=60.0)
    asked = m.Evacuate("n7", "1")
    assert ask(node.environment.socket, asked) == m.Ok()
    await first.demand(m.Admit(2, 60.0), 30)
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    while len(found := (await lease(first, 60.0, 2)).evacuations) < 2:
        await asyncio.sleep(0.01)
    assert found[0] == asked
    assert (found[1].node, found[1].reason) == (node.environment.node, SIGTERM_REASON)
    assert not (await lease(first, 0.0, 2)).evacuations[2:]
    refused = ask(node.environment.socket, asked)
    assert isinstance(refused, m.Refused) and "no supervisor leads" in refused.reason
    first.close()
    second = await led(node, incarnation=3)
    assert not (await lease(second, 60.0, 3)).evacuations
    second.close()


@pytest.mark.parametrize("stay", [0.0, 30.0])
async def test_only_a_boundary_that_trainers_must_not_leave_has_to_lie_ahead(
    node: SmpNode, stay: float
) -> None:
    """Others could not pass the next iteration without the ranks that stay."""
    link = await led(node)
    await link.demand(create(), 30)
    with Arena.open(node.environment.node_dir / "dp0.arena") as arena:
        arena.write_progress(2)
        answer = await link.ask(m.Grant(1, snapshot(1), 2, stay=stay), 30)
        permit = arena.permit()
        assert permit is not None and permit.stay == stay
    assert isinstance(answer, m.Refused) == bool(stay), answer
    await link.demand(m.Abort(1, snapshot(1), "refused"), 30)
    await link.demand(m.Grant(1, snapshot(2), 3, stay=stay), 30)
    link.close()


async def test_a_heartbeat_gives_a_damaged_permit_again_and_says_that_an_arena_is_missing(
    node: SmpNode,
) -> None:
    """A trainer without the permit would pass its iteration, and nobody would know."""
    path = node.environment.node_dir / "dp0.arena"
    link = await led(node)
    await link.demand(create(), 30)
    older = path.read_bytes()
    await link.demand(m.Grant(1, snapshot(1), 10), 30)
    with Arena.open(path) as arena, path.open("r+b") as file:
        given = arena.permit()
        assert given is not None and given.iteration == 10
        file.write(older)
        file.flush()
        assert arena.permit() is None
        assert not (await lease(link, 60.0)).missing
        assert arena.permit() == given
    path.unlink()
    answer = await lease(link, 60.0)
    assert "dp0.arena was removed" in answer.missing and not answer.held
    refused = await link.ask(m.Grant(1, snapshot(2), 20), 30)
    assert isinstance(refused, m.Refused) and "was removed" in refused.reason
    link.close()


async def test_the_server_key_alone_opens_nothing(node: SmpNode) -> None:
    """Who knows the public key of SMPs but has a key pair of their own is turned away."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = JobKeys.derive(SECRET).server_public
    socket.connect(await node.endpoint())
    await socket.send_multipart([b"1", m.encode(m.Admit(1, 60.0))])
    assert not await socket.poll(2000)
    socket.close()


async def test_files_are_private_and_the_process_is_small(node: SmpNode) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    link.close()
    assert (await status_of(node)).resident_bytes < 100 << 20
    for name in ("smp.sock", "dp0.arena"):
        mode = (node.environment.node_dir / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600, name


async def test_a_shard_that_does_not_fit_its_arena_is_refused(node: SmpNode) -> None:
    link = await led(node)
    await link.demand(create(), 30)
    await link.demand(create(), 30)
    larger = m.CreateArena(**{**_fields(create()), "data_bytes": 262144})
    with pytest.raises(LayoutMismatchError, match="another --job name"):
        await link.demand(larger, 30)
    await link.demand(m.Adopt(1, (Ancestor(1, None),), None, keep=()), 30)
    await link.demand(larger, 30)
    link.close()


def _fields(request: m.CreateArena) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


async def test_an_smp_of_another_job_in_the_same_folder_is_refused(
    node: SmpNode, tmp_path: Path
) -> None:
    await node.endpoint()
    second = SmpNode(tmp_path)
    second.job = uuid.UUID(int=8)
    second.start()
    assert second.process is not None and second.process.wait(60) == 1
    assert "another SMP already owns" in second.log.read_text()
    assert node.process is not None and node.process.poll() is None


async def test_a_later_smp_of_the_same_job_takes_over(node: SmpNode, tmp_path: Path) -> None:
    """As after a supervisor that was killed before it had noted the SMP that it had started."""
    link = await led(node)
    await link.demand(create(), 30)
    link.close()
    second = SmpNode(tmp_path)
    second.start()
    try:
        assert node.process is not None
        assert await asyncio.to_thread(node.process.wait, 60) == -signal.SIGKILL
        await second.endpoint()
    finally:
        second.kill()
    assert "adopted 1 arenas: dp0" in second.log.read_text()


async def test_noise_on_the_unix_socket_is_survived(node: SmpNode) -> None:
    link = await led(node)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    socket.connect(f"ipc://{node.environment.socket}")
    for frame in (b"", b"\xff" * 100, m.encode(m.Commit(1, snapshot(1), "local"))):
        socket.send(frame)
        reply = await asyncio.to_thread(_receive, socket)
        assert isinstance(m.decode(reply), m.Refused), frame
    socket.close()
    context.term()
    assert isinstance(await link.ask(m.Lease(1, 1.0), 30), m.LeaseAnswer)
    link.close()


def _receive(socket: zmq.Socket[bytes]) -> bytes:
    assert socket.poll(30000), "the SMP did not answer"
    return socket.recv()


async def test_discard_frees_memory_only_when_nobody_leads(node: SmpNode) -> None:
    link = await led(node, seconds=60.0)
    await link.demand(create(), 30)
    refused = await asyncio.to_thread(ask, node.environment.socket, m.Discard())
    assert isinstance(refused, m.Refused) and "supervisor" in refused.reason
    await lease(link, 0.0)
    await asyncio.to_thread(ask, node.environment.socket, m.Discard())
    assert node.process is not None
    assert await asyncio.to_thread(node.process.wait, 30) == 0
    link.close()
    assert not (node.environment.node_dir / "dp0.arena").exists()


def test_clean_says_how_long_to_wait_and_then_what_it_freed(
    node: SmpNode, capsys: pytest.CaptureFixture[str]
) -> None:
    job = node.environment.node_dir.parent
    words = ["clean", "--job", job.name, "--arena-dir", str(job.parent)]
    words += ["--state-dir", str(job / "notes")]

    async def story() -> None:
        link = await led(node, seconds=60.0)
        await link.demand(create(), 30)
        assert await asyncio.to_thread(main, words) == 1
        said = capsys.readouterr().err
        assert re.search(r"node node0: .* end it, and wait (5\d|60) s", said), said
        await lease(link, 0.0)
        link.close()

    run(story())
    size = (node.environment.node_dir / "dp0.arena").stat().st_size
    assert main(words) == 0
    freed = re.search(r"removed (\S+) MiB", capsys.readouterr().out)
    assert freed and float(freed[1]) >= round(size / (1 << 20), 1) > 0


READER = """
import os, sys
from pathlib import Path
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc.local_query import pinned
with pinned([Path(p) for p in sys.argv[1:]], SnapshotId(1, 1)):
    print("pinned", flush=True)
    sys.stdin.read()
"""


def reader(*nodes: SmpNode) -> subprocess.Popen[str]:
    """A process that holds snapshot 1.1 until its standard input ends."""
    folders = [str(node.environment.node_dir) for node in nodes]
    process = subprocess.Popen(
        [sys.executable, "-c", READER, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def with_two_commits(node: SmpNode) -> SmpLink:
    link = await led(node)
    await link.demand(create(), 30)
    for sequence in (1, 2):
        await link.demand(m.Grant(1, snapshot(sequence), 2 * sequence), 30)
        say(node, capture(node))
        await node.event(m.Sealed)
        await link.demand(m.Commit(1, snapshot(sequence), "local"), 30)
    return link


async def released(link: SmpLink) -> None:
    """Until a heartbeat says that no reader is in the way."""
    for _ in range(300):
        if not (await link.demand(m.Lease(1, 60.0), 30)).pinned:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the pin outlived its reader")


@pytest.mark.parametrize("killed", [False, True], ids=["unpins", "is killed"])
async def test_a_pin_lasts_until_its_reader_has_gone(node: SmpNode, killed: bool) -> None:
    link = await with_two_commits(node)
    first, second = reader(node), reader(node)
    third = m.Grant(1, snapshot(3), 6)
    for process in (first, second):
        assert (await link.demand(m.Lease(1, 60.0), 30)).pinned
        answer = await link.ask(third, 30)
        assert isinstance(answer, m.Refused) and isinstance(answer.error, PinnedError)
        if killed:
            process.kill()
        process.communicate(timeout=30)
    await released(link)
    await link.demand(third, 30)
    link.close()


async def test_a_new_incarnation_waits_for_no_reader(node: SmpNode) -> None:
    link = await with_two_commits(node)
    process = reader(node)
    await link.demand(m.Admit(2, 60.0), 30)
    await link.demand(m.Grant(2, snapshot(1, 2), 6), 30)
    assert process.poll() is None, "a reader is never killed"
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    link.close()


async def test_a_pin_that_one_node_refuses_holds_no_other(tmp_path: Path, node: SmpNode) -> None:
    other = SmpNode(tmp_path, "node1")
    other.start()
    try:
        link = await with_two_commits(node)
        away = await led(other)
        await away.demand(create(), 30)
        process = reader(node, other)
        _, errors = process.communicate(timeout=30)
        assert "cannot be held in" in errors and "node1" in errors
        assert not (await link.demand(m.Lease(1, 60.0), 30)).pinned
        await link.demand(m.Grant(1, snapshot(3), 6), 30)
        for one in (link, away):
            one.close()
    finally:
        other.kill()


def test_a_node_without_an_smp_needs_no_pin(tmp_path: Path) -> None:
    node = SmpNode(tmp_path)
    node.start()
    asyncio.run(node.endpoint())
    node.kill()
    process = reader(node)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


async def test_a_dead_process_cannot_pin(node: SmpNode) -> None:
    link = await with_two_commits(node)
    gone = subprocess.Popen(["true"])
    gone.wait()
    answer = ask(node.environment.socket, m.Pin("r", snapshot(1), gone.pid))
    assert isinstance(answer, m.Refused)
    assert not (await link.demand(m.Lease(1, 60.0), 30)).pinned
    link.close()
