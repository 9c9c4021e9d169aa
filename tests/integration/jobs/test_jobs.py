"""Jobs that lose trainers, encoders, SMPs, nodes and their supervisor, against the oracle."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import first_meta_block
from megatron_ft.arena.format import BLOCK_BYTES, SlotState
from megatron_ft.checkpoint.native import TRACKER
from megatron_ft.cli import status
from megatron_ft.core import procfs
from megatron_ft.core.errors import (
    ArenaForeignError,
    ArenaMemoryError,
    ConfigError,
    LayoutMismatchError,
    ProtectionError,
    UnrecoverableError,
)
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.supervisor.membership import NoSpareError
from megatron_ft.supervisor.orders import Timing
from tests.support.disk_jobs import signal_trainers, wait_until
from tests.support.fates import in_incarnation, noticed, of_node
from tests.support.jobs import ROOT, Fault, Job, Result, Uninterrupted, difference

pytestmark = [pytest.mark.usefixtures("warm_trainers"), pytest.mark.mpi]


@pytest.fixture(scope="module")
def four(uninterrupted: Uninterrupted) -> Result:
    return uninterrupted(4, 40)


def kill_rank(rank: int) -> Fault:
    return lambda job: os.kill(job.trainers()[rank], signal.SIGKILL)


def kill_of_node(node: str, module: str) -> Fault:
    """SIGKILL the processes of ``node`` whose command line has ``module`` in it."""

    def strike(job: Job) -> None:
        for pid in of_node(job, node, module):
            os.kill(pid, signal.SIGKILL)

    return strike


def lose(*nodes: str) -> Fault:
    def strike(job: Job) -> None:
        for node in nodes:
            job.cluster.kill_node(node)

    return strike


def test_a_forked_trainer_is_found_and_killed_as_a_started_one(
    made: list[Job], tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes=2)
    made.append(job)
    command, environment = job.training_command(), {"RANK": "7"}
    one, other = (
        job.cluster.start(node, command, environment, tmp_path / f"{node}.log")
        for node in ("n0", "n1")
    )
    assert job.cluster.processes_of("n0") == [one.pid]
    shown = procfs.read_environment(one.pid)
    assert shown["RANK"] == "7" and "PATH" not in shown
    assert os.getsid(one.pid) == one.pid != other.pid
    assert job.cluster.kill_node("n0") == [one.pid]
    assert one.join(30) == -signal.SIGKILL and other.alive()


def test_every_kind_of_process_dies_once_and_nothing_changes(
    made: list[Job], tmp_path: Path, four: Result
) -> None:
    job = Job(tmp_path, nodes=4, spares=1, protect="rs:3+1")
    made.append(job)
    kill_encoder = noticed("world_ended", kill_of_node("n3", "megatron_ft.erasure.worker"))
    kill_smp = noticed("smp_restarted", kill_of_node("n1", "megatron_ft.smp"))
    job.run(
        (6, kill_rank(1)), (12, in_incarnation(2, kill_encoder)), (18, kill_smp), (24, lose("n2"))
    )
    assert not difference(job.result(), four), job.story()
    sources = [source for _, source in job.restores()]
    assert sources == ["own memory", "parity"], job.story()
    assert "smp_restarted" in job.kinds() and "spare" in job.kinds(), job.story()
    assert "world_ended" in job.kinds(), job.story()


def test_two_nodes_lost_at_once_with_two_parity_members(
    made: list[Job], tmp_path: Path, four: Result
) -> None:
    job = Job(tmp_path, nodes=4, spares=2, protect="rs:2+2")
    made.append(job)
    job.run((10, lose("n0", "n3")))
    assert not difference(job.result(), four), job.story()
    # The second loss may be noticed in the recovery from the first, which then is done again.
    assert {source for _, source in job.restores()} == {"parity"}, job.story()


@pytest.mark.all_layouts
def test_two_ranks_a_node_make_two_stripes(made: list[Job], tmp_path: Path, four: Result) -> None:
    """The first spare is of the survivor's rack, which would then hold a whole stripe."""
    racks = {"n0": "r0", "n1": "r1", "n2": "r0", "n3": "r1"}
    job = Job(tmp_path, nodes=2, spares=2, protect="replica:2", ranks_per_node=2, domains=racks)
    made.append(job)
    job.run((10, lose("n1")))
    assert not difference(job.result(), four), job.story()
    assert job.supervisor.members.active == ["n0", "n3"], job.story()
    assert "crowded" not in job.kinds(), job.story()


def test_more_losses_than_parity_stop_the_job_until_told_to_start_over(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, spares=4, protect="xor:2", iterations=40)
    made.append(job)
    with pytest.raises(UnrecoverableError, match=r"lost 2 shards|no survivor|no arena") as caught:
        job.run((8, lose("n0", "n1")))
    assert "--from-scratch" in str(caught.value)
    job.more["from_scratch"] = True
    job.run()
    assert not difference(job.result(), two), job.story()
    assert "from_scratch" in job.kinds()


def test_more_losses_than_parity_go_on_from_a_complete_checkpoint(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """The training command reads it itself; this one has none of its own and starts over."""
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "iter_0000004").mkdir(parents=True)
    (checkpoints / "iter_0000004" / "metadata.json").write_text("{}")
    (checkpoints / TRACKER).write_text("4")
    job = Job(tmp_path, nodes=2, spares=2, protect="xor:2", checkpoint_dir=checkpoints)
    made.append(job)
    # The second node is lost while the first one's shard is about to be rebuilt.
    job.at_event["restoring"] = lose("n1")
    job.run((8, lose("n0")))
    assert not difference(job.result(), two), job.story()
    assert "from_disk" in job.kinds(), job.story()
    assert "the SMP of n1 ended" in job.story(), "it was asked in vain"


def test_a_lost_spare_does_not_interrupt_training(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, spares=1, protect="xor:2")
    made.append(job)
    job.run((6, lose("n2")))
    assert not difference(job.result(), two), job.story()
    assert "spare_lost" in job.kinds(), job.story()
    assert job.kinds().count("trainers_started") == 1, job.story()


def test_no_spare_left_is_said(made: list[Job], tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2, protect="xor:2")
    made.append(job)
    with pytest.raises(NoSpareError, match="n1.*--spares"):
        job.run((6, lose("n1")))


def test_a_flipped_byte_is_found_and_rebuilt_from_parity(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """In the last block that is looked at as it is copied: tensors before it are loaded then."""

    def corrupt(job: Job) -> None:
        shard = "pp0-tp0-dp1-ep0"
        (smp,) = of_node(job, "n1", "megatron_ft.smp")
        # A living trainer would write the slot anew; recovery would begin before the flip.
        os.kill(smp, signal.SIGSTOP)
        trainer = os.pidfd_open(job.trainers()[1])
        signal.pidfd_send_signal(trainer, signal.SIGKILL)
        assert procfs.ended(trainer, 10), "the killed trainer has not ended after 10 s"
        os.close(trainer)
        with Arena.open(job.cluster.node_dir("n1") / f"{shard}.arena") as arena:
            # A snapshot that the stopped SMP has not sealed yet has no record; it may still commit.
            records = [held for slot in range(2) if (held := arena.slot(slot).record) is not None]
            last = first_meta_block(records[0], arena.geometry.block_bytes)
            assert last > 0, "all tensors lie in one block with the small objects"
            for slot in range(2):
                data = arena.data(slot, writable=True)
                data[last * arena.geometry.block_bytes - 1] ^= 1
                del data
        os.kill(smp, signal.SIGCONT)

    job = Job(tmp_path, nodes=2, protect="xor:2", block_bytes=4096)
    made.append(job)
    job.run((10, corrupt))
    assert not difference(job.result(), two), job.story()
    assert "corrupt" in job.kinds(), job.story()
    assert job.restores()[-1][1] == "parity", job.story()


def test_the_same_command_takes_over_after_the_supervisor_was_killed(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=40, iteration_seconds=0.15)
    made.append(job)
    command = [sys.executable, "-m", "megatron_ft.cli.main", "run", "--job", job.name]
    command += ["--nodes", "2", "--protect", "xor:2", "--lease-seconds", "8", "--trainer-per-node"]
    stub = job.cluster.stub(*job.training_command()[1:])
    command += ["--state-dir", str(tmp_path / "state"), "--", *stub]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "(protected)" in line:
            break
    first.kill()
    first.communicate()
    held = [_committed(job, node) for node in ("n0", "n1")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end of an older supervisor's lease" in done.stdout and "own memory" in done.stdout
    assert min(held) > 0
    assert not difference(job.result(), two), done.stdout


def _committed(job: Job, node: str) -> int:
    folder = job.cluster.job_dir / node.replace("n", "node")
    status = ask(folder / "smp.sock", m.StatusRequest())
    slots = [slot for arena in status.arenas for slot in arena.slots]
    return max(slot.iteration for slot in slots if slot.state == SlotState.COMMITTED)


@pytest.mark.all_layouts
def test_another_shape_of_model_is_refused_and_costs_no_snapshot(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, protect="xor:2", spares=0)
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((10, lose("n1")))
    job.cluster.revive("n1")
    job.width = 65
    with pytest.raises(LayoutMismatchError, match="model"):
        job.run()
    job.width = 64
    job.run()
    assert not difference(job.result(), two), job.story()


def test_a_job_goes_on_with_the_digests_that_its_arenas_have(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Those of an earlier release."""
    job = Job(tmp_path, nodes=2, protect="xor:2", block_bytes=4096)
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((10, lose("n1")))
    job.cluster.revive("n1")
    job.more["block_bytes"] = BLOCK_BYTES
    found = []

    def look(job: Job) -> None:
        for node in ("n0", "n1"):
            (path,) = job.cluster.node_dir(node).glob("*.arena")
            with Arena.open(path) as arena:
                found.append(arena.geometry.block_bytes)
                levels = {arena.slot(slot).local_only for slot in range(2)}
                assert levels == {False}, "there was parity for each snapshot"

    job.run((30, look))
    assert found == [4096] * 2
    assert [source for _, source in job.restores()] == ["parity"], job.story()
    assert not difference(job.result(), two), job.story()


def test_snapshots_of_another_job_are_not_written_over(made: list[Job], tmp_path: Path) -> None:
    """The notes of the job are gone, its arenas are not: nothing may be lost by a mistake."""
    job = Job(tmp_path, nodes=2, protect="xor:2")
    made.append(job)
    with pytest.raises(NoSpareError):
        job.run((6, lose("n1")))
    kill_of_node("n0", "megatron_ft.smp")(job)
    job.cluster.revive("n1")
    shutil.rmtree(tmp_path / "state")
    (arena,) = job.cluster.node_dir("n0").glob("*.arena")
    before = arena.read_bytes()
    with pytest.raises(ArenaForeignError, match=r"--state-dir.*megatron-ft clean"):
        job.run()
    assert arena.read_bytes() == before


def test_without_encoders_snapshots_go_on_locally(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Encoders that die again and again degrade protection, and stop nothing."""

    def no_more_worlds(job: Job) -> None:
        job.supervisor.encoder_group.processes.start = _refuse  # type: ignore[method-assign, assignment]
        kill_of_node("n0", "megatron_ft.erasure.worker")(job)

    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=40)
    made.append(job)
    job.run((6, no_more_worlds), (30, lambda job: None))
    assert not difference(job.result(), two), job.story()
    levels = [e.fields["level"] for e in job.events if e.kind == "committed"]
    assert levels[0] == "protected" and levels[-1] == "local", levels


def test_trainers_that_die_while_encoders_are_away_lose_no_commit(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    """Two slots: a protected snapshot, and a newer local one, which must outlive all trainers."""

    def no_more_worlds(job: Job) -> None:
        encoders = job.supervisor.encoder_group.processes
        start, encoders.start = encoders.start, _refuse  # type: ignore[method-assign, assignment]
        kill_of_node("n0", "megatron_ft.erasure.worker")(job)
        wait_until(job, lambda: "local" in _levels(job), "for a local snapshot")
        at = [e for e in job.events if e.kind == "committed"][-1].fields["iteration"]
        progress = job.supervisor.fleet.progress
        wait_until(job, lambda: max(progress.values()) > at + 4, "for iterations after it")
        wait_until(job, lambda: _promise(job) in _status(job), "for what status promises")
        encoders.start = start  # type: ignore[method-assign]
        signal_trainers(job, signal.SIGKILL)

    job = Job(tmp_path, nodes=2, protect="xor:2", iterations=40)
    made.append(job)
    job.run((6, no_more_worlds), (8, in_incarnation(2, lambda job: None)))
    restored = job.kinds().index("restoring")
    newest = [e.fields for e in job.events[:restored] if e.kind == "committed"][-1]["iteration"]
    assert job.restores()[0] == (newest, "own memory"), job.story()
    after = [e.fields for e in job.events[restored:] if e.kind == "committed"]
    levels = {(fields["iteration"], fields["level"]) for fields in after}
    assert (newest, "protected") in levels, job.story()
    assert not difference(job.result(), two), job.story()


def _promise(job: Job) -> str:
    newest = [e for e in job.events if e.kind == "committed"][-1]
    return f"iteration {newest.fields['iteration']} survives a crash"


def _status(job: Job) -> str:
    return status.render(job.name, status.collect(job.cluster.root, job.name)[job.name])


def _levels(job: Job) -> list[str]:
    return [e.fields["level"] for e in job.events if e.kind == "committed"]


def _refuse(*_: object) -> str:
    from megatron_ft.launchers.launcher import NodeUnreachable

    raise NodeUnreachable("no encoders in this test")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_too_little_memory_is_said_at_the_start(
    made: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shared memory of Open MPI has no room there either.
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    small = tmp_path / "small"
    small.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", small], check=True)
    try:
        job = Job(tmp_path, nodes=2, protect="xor:2", width=512, root=small)
        made.append(job)
        with pytest.raises(ArenaMemoryError, match="slots"):
            job.run()
        # Optimizers make their moments in the first step, so that is when a layout is complete.
        assert max(job.result()[0], default=0) <= 1
        job.cluster.destroy()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def limit_files(job: Job, node: str, size: int) -> None:
    """The SMP of a node can make no larger file: as little room as on a full file system."""
    for pid in job.cluster.processes_of(node):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_spare_without_room_is_passed_over(made: list[Job], tmp_path: Path, two: Result) -> None:
    job = Job(tmp_path, nodes=2, spares=2, protect="xor:2")
    made.append(job)

    def fill_and_lose(job: Job) -> None:
        limit_files(job, "n2", 4096)
        job.cluster.kill_node("n1")

    job.run((10, fill_and_lose))
    assert not difference(job.result(), two), job.story()
    assert job.supervisor.members.active == ["n0", "n3"], job.story()
    assert [source for _, source in job.restores()] == ["parity", "parity"], job.story()
    (refused,) = [event for event in job.events if event.kind == "no_room"]
    assert refused.fields["node"] == "n2" and "n2: " in refused.text, job.story()
    assert job.supervisor.members.spares_gone()


@pytest.mark.all_layouts
def test_the_last_spare_without_room_stops_the_job_until_it_has_some(
    made: list[Job], tmp_path: Path, two: Result
) -> None:
    job = Job(tmp_path, nodes=2, spares=1, protect="xor:2")
    made.append(job)

    def fill_and_lose(job: Job) -> None:
        limit_files(job, "n2", 4096)
        job.cluster.kill_node("n1")

    with pytest.raises(NoSpareError, match=r"no room on n2.*--spares"):
        job.run((10, fill_and_lose))
    limit_files(job, "n2", resource.RLIM_INFINITY)
    job.run()
    assert not difference(job.result(), two), job.story()
    assert job.restores()[-1][1] == "parity", job.story()


@pytest.mark.parametrize(("lease", "silence"), [(0.0, 15.0), (-1.0, 15.0), (10.0, 10.0)])
def test_leases_that_would_fence_nobody_are_refused(lease: float, silence: float) -> None:
    with pytest.raises(ConfigError, match="lease"):
        Timing(lease=lease, node_timeout=silence)


@pytest.mark.parametrize(
    ("nodes", "protect", "words"),
    [(3, "rs:3+1", "needs 4 nodes, there are 3"), (1, "xor:2", "needs 2 nodes, there are 1")],
)
def test_impossible_protection_is_refused_at_once(
    made: list[Job], tmp_path: Path, nodes: int, protect: str, words: str
) -> None:
    job = Job(tmp_path, nodes=nodes, spares=3, protect=protect)
    made.append(job)
    with pytest.raises(ProtectionError, match=words):
        job.run()


def test_a_stopped_job_starts_again_at_once_and_says_that_nothing_was_protected(
    tmp_path: Path,
) -> None:
    name = f"stopped-{os.getpid()}"
    command = [sys.executable, "-m", "megatron_ft", "run", "--job", name, "--nodes", "1"]
    command += ["--protect", "none", "--lease-seconds", "30", "--state-dir", str(tmp_path), "--"]
    first = subprocess.Popen([*command, "sleep", "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "1 trainers started" in line:
            break
    first.terminate()
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "nothing was protected; no rank asked" in said
    done = subprocess.run([*command, "true"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "older supervisor" not in done.stdout
    assert "warning: nothing was protected; no rank asked" in done.stdout
