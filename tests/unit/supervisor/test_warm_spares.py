"""Spares import what trainers will, once and quietly."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.config import SnapshotConfig
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.processes import WarmSpares, modules_of
from megatron_ft.supervisor.spec import JobSpec

WAIT_SECONDS = 60.0
MODULE = """
import os, pathlib
name = os.environ["MEGATRON_FT_NODE"] + "-" + str(os.getpid())
text = f"{os.nice(0)} {os.environ['CUDA_VISIBLE_DEVICES']!r} {os.environ['GIVEN']}"
pathlib.Path(__file__).with_name(name).write_text(text)
"""


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    made = VirtualCluster(f"warm-{uuid.uuid4().hex[:8]}", ["n0", "n1", "n2"])
    yield made
    made.destroy()


def test_each_spare_imports_once_and_what_is_missing_spoils_nothing(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    (tmp_path / "slow_to_import.py").write_text(MODULE)
    spec = JobSpec(
        name=cluster.job,
        command=("env", sys.executable, "train.py"),
        nodes=1,
        settings=SnapshotConfig(protect="none"),
        log_dir=tmp_path / "logs",
        environment={"PYTHONPATH": str(tmp_path), "GIVEN": "this"},
        warm_modules=("no_such_module", "slow_to_import"),
    )
    spares = WarmSpares(cluster, spec)
    cluster.kill_node("n2")
    for _ in range(2):
        spares.begin(["n1", "n2"])
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := list(tmp_path.glob("n*-*"))) or not found[0].read_text():
        assert time.monotonic() < deadline, "the spare has imported nothing"
        time.sleep(0.02)
    spares.end()
    (noted,) = found
    assert noted.name.startswith("n1-") and noted.read_text() == "19 '' this"
    assert "no_such_module: ModuleNotFoundError" in (tmp_path / "logs/spare-n1.log").read_text()


def test_an_import_that_lasts_ends_with_the_job(cluster: VirtualCluster, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)")
    spec = JobSpec(
        name=cluster.job,
        command=(sys.executable, "train.py"),
        nodes=1,
        settings=SnapshotConfig(protect="none"),
        log_dir=tmp_path / "logs",
        environment={"PYTHONPATH": str(tmp_path)},
        warm_modules=("endless",),
    )
    spares = WarmSpares(cluster, spec)
    spares.begin(["n1"])
    (pid,) = cluster.processes_of("n1")
    spares.end()
    process = spares.handles()[0]
    assert asyncio.run(asyncio.wait_for(process.wait(), WAIT_SECONDS)) < 0
    assert not os.path.exists(f"/proc/{pid}/exe")


@pytest.mark.parametrize(
    ("wanted", "command", "some", "others"),
    [
        ("auto", ["python", "x.py"], {"torch"}, {"deepspeed", "megatron.training.training"}),
        (
            "auto",
            ["python", "x.py", "--inmem-snapshot"],
            {"torch", "megatron.training.training"},
            {"deepspeed"},
        ),
        ("jax, numpy", ["python", "x.py"], {"jax", "numpy"}, {"torch", ""}),
        ("none", ["python", "x.py"], set(), {"torch", "none"}),
    ],
)
def test_what_is_imported_follows_from_the_command(
    wanted: str, command: list[str], some: set[str], others: set[str]
) -> None:
    found = set(modules_of(wanted, command))
    assert some <= found and not others & found
