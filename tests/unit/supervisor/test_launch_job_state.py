"""A job's folders: its state, what counts as left behind; the environment of its trainers."""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import private_files
from megatron_ft.core.errors import ConfigError, ControlPlaneError, StaleIncarnationError
from megatron_ft.supervisor import job_state
from megatron_ft.supervisor.job_state import (
    JobHeldError,
    JobState,
    SmpPlace,
    read_record,
    state_folder,
)
from megatron_ft.supervisor.processes import TrainerPlace
from tests.support.job_folders import unused
from tests.support.jobs import ROOT

HOLD = """
import sys
from pathlib import Path
from megatron_ft.supervisor.job_state import JobState
JobState(Path(sys.argv[1]), "llm")
print("held", flush=True)
sys.stdin.read()
"""


def test_state_is_private_and_survives_being_reopened(tmp_path: Path) -> None:
    folder = tmp_path / "llm"
    with JobState(folder, "llm") as state:
        first = state.record
        state.update(smps={"n0": SmpPlace(12, 34, "tcp://10.0.0.1:5")}, active=("n0", "n1"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "job.json").stat().st_mode) == 0o600
    with JobState(folder, "llm") as again:
        assert again.record.secret == first.secret and len(first.secret) == 32
        assert again.record.job == first.job
        assert again.record.smps["n0"].endpoint == "tcp://10.0.0.1:5"
        assert again.record.active == ("n0", "n1")


def test_what_a_full_disk_does_not_take_is_refused_and_not_believed(tmp_path: Path) -> None:
    """A job resumes from memory and tries again: that is no end of it."""
    with JobState(tmp_path / "llm", "llm") as state:
        before = state.record
        # A new record is first written beside the old one, where this lies now.
        in_the_way = tmp_path / "llm" / ".job.json.tmp"
        in_the_way.mkdir()
        with pytest.raises(ControlPlaneError, match="notes of job 'llm' cannot be written to"):
            state.update(committed=True)
        assert state.record == before
        in_the_way.rmdir()
        assert state.update(committed=True).committed
    assert read_record(tmp_path / "llm", "llm") == state.record


def test_notes_that_are_removed_are_written_again_with_the_secret_and_the_lock(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "job"
    with JobState(folder, "job") as state:
        secret = state.record.secret
        shutil.rmtree(folder)
        state.update(incarnation=3)
        found = read_record(folder, "job")
        assert found is not None and (found.secret, found.incarnation) == (secret, 3)
        with pytest.raises(JobHeldError):
            JobState(folder, "job")
        shutil.rmtree(folder)
        JobState(folder, "job").close()
        with pytest.raises(StaleIncarnationError, match="belong to another job"):
            state.update(incarnation=4)


def test_a_second_supervisor_is_refused_by_name_until_the_first_is_dead(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert select.select([holder.stdout], [], [], 30)[0], "the first supervisor did not start"
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ControlPlaneError, match=f"process {holder.pid}"):
            JobState(tmp_path, "llm")
    finally:
        holder.kill()
        holder.communicate()
    JobState(tmp_path, "llm").close()


def test_two_jobs_have_different_secrets(tmp_path: Path) -> None:
    with JobState(tmp_path / "a", "a") as one, JobState(tmp_path / "b", "b") as other:
        assert one.record.secret != other.record.secret


def test_the_secret_is_in_no_text_made_from_the_record(tmp_path: Path) -> None:
    with JobState(tmp_path, "llm") as state:
        texts = f"{state.record!r} {state.record} {state!r} {list(state.record.__rich_repr__())}"
        assert repr(state.record.secret)[2:-1] not in texts
        assert "secret" not in texts


def damage(folder: Path, **changes: object) -> None:
    path = folder / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "of another job, user or release"),
        ({"name": "other"}, "of another job, user or release"),
        ({"uid": os.geteuid() + 1}, "of another job, user or release"),
        ({"secret": ""}, "no secret"),
        ({"job": "not-a-uuid"}, "damaged"),
        ({"unknown": 1}, "damaged"),
    ],
)
def test_foreign_or_damaged_state_is_refused_with_a_way_out(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    JobState(tmp_path, "llm").close()
    damage(tmp_path, **changes)
    with pytest.raises(ControlPlaneError, match=reason) as caught:
        JobState(tmp_path, "llm")
    assert str(tmp_path / "job.json") in str(caught.value)
    assert "megatron-ft clean" in str(caught.value)


def test_unreadable_json_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{")
    (tmp_path / "job.json").chmod(0o600)
    for _ in range(2):
        with pytest.raises(ControlPlaneError, match="damaged"):
            JobState(tmp_path, "llm")


def test_a_write_that_is_cut_short_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JobState(tmp_path, "llm") as state:
        state.update(scheme="xor:4")

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ControlPlaneError, match="no space"):
            state.update(scheme="rs:3+1")
    record = read_record(tmp_path, "llm")
    assert record is not None and record.scheme == "xor:4"


def test_remove_forgets_the_job_but_not_what_others_put_there(tmp_path: Path) -> None:
    folder = tmp_path / "llm"
    JobState(folder, "llm").remove()
    assert not folder.exists()
    state = JobState(folder, "llm")
    (folder / "notes.txt").write_text("mine")
    state.remove()
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_the_folder_of_a_job(tmp_path: Path) -> None:
    assert state_folder("llm", tmp_path) == tmp_path / "llm"
    assert state_folder("llm").parts[-3:] == (".cache", "megatron-ft", "llm")
    with pytest.raises(ConfigError):
        state_folder("../x")


def test_notes_that_cannot_be_written_are_refused_and_the_lock_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(private_files, "replace_file", full)
    with pytest.raises(ControlPlaneError, match="No space left.*another --state-dir"):
        JobState(tmp_path / "job", "job")
    monkeypatch.undo()
    JobState(tmp_path / "job", "job").close()


def test_a_lock_is_given_back_if_its_file_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(lock: int, path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(job_state.private_files, "is_at", gone)
    with pytest.raises((OSError, ControlPlaneError)):
        JobState(tmp_path / "llm", "llm")
    monkeypatch.undo()
    JobState(tmp_path / "llm", "llm").close()


SUPERVISOR = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from megatron_ft.supervisor.job_state import JobState
with JobState(Path(sys.argv[1]), "led"):
    print("leads", flush=True)
    sys.stdin.read()
"""


def test_what_another_run_leads_is_none_of_ours(tmp_path: Path) -> None:
    """Its nodes have just been killed, and the next incarnation waits for its turn."""
    root = tmp_path / "root"
    left, led = root / "left", root / "led"
    for folder in (root, left, led):
        folder.mkdir(mode=0o700)
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "state" / "led"), str(ROOT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"leads\n"
        assert unused(root, {os.getpid()}) == {left}
        assert unused(root, {os.getpid(), other.pid}) == {left, led}, "one of our own is left"
        other.stdin.close()
        assert other.wait(30) == 0
    assert unused(root, {os.getpid()}) == {left, led}


def environment(
    base: dict[str, str], node: int, local: int, nodes: int, per_node: int
) -> dict[str, str]:
    place = TrainerPlace(
        node_index=node,
        local_rank=local,
        node_count=nodes,
        ranks_per_node=per_node,
        master_address="127.0.0.1",
        master_port=4321,
        run_id="job",
        restart_count=2,
    )
    return place.of_rank(base)


@given(st.integers(1, 5), st.integers(1, 5))
def test_ranks_are_numbered_node_by_node(nodes: int, per_node: int) -> None:
    places = [(node, local) for node in range(nodes) for local in range(per_node)]
    all_ranks = [environment({}, node, local, nodes, per_node) for node, local in places]
    assert [int(e["RANK"]) for e in all_ranks] == list(range(nodes * per_node))
    assert all(
        int(e["RANK"]) == int(e["GROUP_RANK"]) * per_node + int(e["LOCAL_RANK"]) for e in all_ranks
    )
    assert {e["WORLD_SIZE"] for e in all_ranks} == {str(nodes * per_node)}
    assert {e["GROUP_WORLD_SIZE"] for e in all_ranks} == {str(nodes)}


def test_base_is_kept_and_an_outer_place_does_not_mislead() -> None:
    base = {"PATH": "/bin", "RANK": "77", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = environment(base, 1, 0, 2, 1)
    assert env["PATH"] == "/bin" and env["RANK"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2" and env["TORCHELASTIC_MAX_RESTARTS"] == "0"
    assert environment({"OMP_NUM_THREADS": "8"}, 0, 0, 1, 1)["OMP_NUM_THREADS"] == "8"
