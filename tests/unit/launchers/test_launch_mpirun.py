"""Worlds of real MPI ranks, and the pure parts of starting them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import procfs
from megatron_ft.core.errors import MpiError
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.launcher_env import without_outer_launcher
from megatron_ft.launchers.mpirun import (
    MpiKind,
    MpiLauncher,
    find_mpi,
    parse_kind,
    parse_version,
    split_environments,
    world_command,
)
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import WORLD, WorldProcess, probe_world
from tests.programs import world_rank

TIMEOUT = 60.0
PROMPT = 20.0
NODES = ["n0", "n1", "n2"]
OPEN_MPI = MpiLauncher(Path("/opt/bin/mpirun"), MpiKind.OPEN_MPI, "5.0.11", "/opt/bin/python")

variables = st.dictionaries(st.sampled_from("ABCDE"), st.text("xy", max_size=2))


@given(st.lists(variables, min_size=1, max_size=4))
def test_split_environments_loses_and_invents_nothing(environments: list[dict[str, str]]) -> None:
    shared, own = split_environments(environments)
    assert [{**shared, **mine} for mine in own] == environments
    for name, value in shared.items():
        assert all(env[name] == value for env in environments)


def test_one_rank_alone_does_not_mark_the_mpi_launcher_as_of_its_node() -> None:
    shared, own = split_environments([{"MEGATRON_FT_NODE": "n0", "SECRET": "s"}])
    assert own == [{"MEGATRON_FT_NODE": "n0"}] and shared == {"SECRET": "s"}


def test_command_has_one_rank_per_placement_in_order() -> None:
    placements = [Placement(n, ["python", "-m", "x"], {}) for n in ("b", "a")]
    command = world_command(OPEN_MPI, placements, [{"N": "b c"}, {"N": "a", "A": "1"}])
    text = [Path(part).name if part.endswith("/env") else part for part in command]
    assert text == (
        ["/opt/bin/mpirun", "-n", "1", "env", "N=b c", "python", "-m", "x"]
        + [":", "-n", "1", "env", "A=1", "N=a", "python", "-m", "x"]
    )


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", MpiKind.OPEN_MPI, "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4", MpiKind.OPEN_MPI, "4.1.4"),
        ("HYDRA build details:\n    Version:      5.0.2\n", MpiKind.MPICH, "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build", MpiKind.MPICH, "2021.13"),
        ("bash: mpirun: broken", None, "0"),
    ],
)
def test_kinds_and_versions(text: str, kind: MpiKind | None, version: str) -> None:
    assert (parse_kind(text), parse_version(text)) == (kind, version)


def test_what_other_launchers_left_is_dropped_but_a_users_tuning_stays() -> None:
    base = {"PATH": "/bin", "OMPI_MCA_btl": "tcp,self", "SLURM_JOB_ID": "1", "PMIX_RANK": "0"}
    assert without_outer_launcher(base) == {"PATH": "/bin"}
    del base["PMIX_RANK"]
    assert without_outer_launcher(base) == {"PATH": "/bin", "OMPI_MCA_btl": "tcp,self"}


def test_mpi4py_that_does_not_import_is_told(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mpi4py'\"; exit 1\n")
    fake.chmod(0o755)
    with pytest.raises(MpiError, match="No module named 'mpi4py'.*pip install"):
        find_mpi(str(fake))


def test_only_another_mpis_launcher_is_told(tmp_path: Path) -> None:
    for name, said in (("python", "Open MPI v5.0.11"), ("mpirun", "HYDRA Version: 5.0.2")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(MpiError, match=r"uses Open MPI.*mpirun \(MPICH\)"):
        find_mpi(str(tmp_path / "python"), {"PATH": str(tmp_path)})


@pytest.fixture(scope="module")
def mpi() -> MpiLauncher:
    return find_mpi()


@pytest.fixture
def cluster(mpi: MpiLauncher) -> Iterator[VirtualCluster]:
    # Not under tmp_path, whose length depends on the test's name: socket paths are short.
    with tempfile.TemporaryDirectory(prefix="mft-") as folder:
        made = VirtualCluster(uuid.uuid4().hex[:12], NODES, Path(folder) / "root", mpi)
        yield made
        made.destroy()


def members(world: WorldProcess) -> list[int]:
    def belongs(pid: int) -> bool:
        return procfs.read_environment(pid).get(WORLD) == world.world

    return [pid for pid in procfs.own_processes() if belongs(pid)]


def place(node: str, folder: Path, *arguments: str) -> Placement:
    argv = [sys.executable, world_rank.__file__, str(folder), *arguments]
    return Placement(node, argv, {**os.environ, "ODD": node})


@pytest.mark.mpi
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a slot per rank")
def test_a_world_of_two_is_not_bound_to_the_first_cores(
    cluster: VirtualCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Open MPI binds to cores unless it may oversubscribe, which a user can switch off.
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "slot")
    world = cluster.start_world([place(n, tmp_path) for n in NODES[:2]], tmp_path / "log")
    assert world.join(TIMEOUT) == 0, (tmp_path / "log").read_text()
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank{rank}").read_text())
        assert seen["processors"] == len(os.sched_getaffinity(0))


@pytest.mark.mpi
def test_a_node_lost_before_its_rank_exists_ends_the_world(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    world = cluster.start_world([place(n, tmp_path, "wait") for n in NODES], tmp_path / "log")
    cluster.kill_node("n2")
    assert world.join(TIMEOUT) != 0
    assert members(world) == [] and cluster.processes_of("n2") == []


@pytest.mark.mpi
def test_probe_counts_more_ranks_than_cores(mpi: MpiLauncher) -> None:
    probe_world(mpi, 4, os.environ)


@pytest.mark.mpi
def test_probe_says_what_mpi_says(mpi: MpiLauncher) -> None:
    if mpi.kind is not MpiKind.OPEN_MPI or mpi.major < 5:
        pytest.skip("only Open MPI 5 counts slots and takes this setting")
    strict = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
    with pytest.raises(MpiError, match="give no world of 3 ranks.*already filled"):
        probe_world(mpi, (os.cpu_count() or 1) + 1, strict)


@pytest.mark.mpi
def test_probe_tells_of_ranks_that_do_not_find_each_other(mpi: MpiLauncher, tmp_path: Path) -> None:
    # A launcher that starts its programs one by one, as another MPI's does.
    script = tmp_path / "mpirun"
    script.write_text('#!/bin/sh\nshift 3\nexec "$1" "$2" "$3" "$4"\n')
    script.chmod(0o755)
    other = MpiLauncher(script, mpi.kind, mpi.version, mpi.python)
    with pytest.raises(MpiError, match="give no world of 2 ranks: ranks in the world: 1"):
        probe_world(other, 2, os.environ)


@pytest.mark.mpi
def test_an_outer_launchers_variables_do_not_mislead(mpi: MpiLauncher) -> None:
    slurm = {"JOBID": "77", "NODELIST": "far[1-4]", "NNODES": "4", "TASKS_PER_NODE": "1(x4)"}
    ranks = {"PMIX_RANK": "3", "OMPI_COMM_WORLD_SIZE": "9", "PMI_RANK": "3"}
    outer = {**os.environ, **ranks, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    probe_world(mpi, 2, outer)


@pytest.mark.mpi
def test_a_world_needs_no_home(mpi: MpiLauncher) -> None:
    homeless = {name: value for name, value in os.environ.items() if name != "HOME"}
    assert find_mpi(environment=homeless) == mpi
    probe_world(mpi, 2, homeless)
    probe_world(mpi, 2, {**homeless, "HOME": ""})


def test_mpi_is_the_one_that_mpi4py_uses(mpi: MpiLauncher) -> None:
    said = subprocess.run(
        [str(mpi.path), "--version"], stdout=subprocess.PIPE, timeout=TIMEOUT, check=True
    ).stdout
    assert parse_kind(said.decode()) is mpi.kind and mpi.version in said.decode()
