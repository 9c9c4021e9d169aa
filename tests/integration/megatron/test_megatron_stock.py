"""The stock ``pretrain_gpt.py`` of a checkout, unedited and patched, loses a trainer.

MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/test.sh \\
     tests/integration/megatron/test_megatron_stock.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.core import startup
from tests.support import traced_script
from tests.support.jobs import ROOT, log_of
from tests.support.megatron_jobs import SNAPSHOTS, check_identical, needs_megatron, stock

CHECKOUT = os.environ.get(traced_script.CHECKOUT)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.megatron,
    pytest.mark.slow,
    needs_megatron,
    pytest.mark.skipif(
        CHECKOUT is None, reason=f"needs {traced_script.CHECKOUT} to name a checkout of Megatron-LM"
    ),
]


@pytest.fixture(scope="module")
def checkout() -> Path:
    return traced_script.find_checkout()


def test_the_unedited_script_survives_a_kill(
    checkout: Path, megatron_corpus: Path, tmp_path: Path
) -> None:
    job = check_identical(stock(checkout), megatron_corpus, tmp_path)
    assert "no checkpoint was read" in log_of(job, 0)


def test_a_patched_copy_survives_a_kill_without_the_search_path(
    checkout: Path, megatron_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "Megatron-LM"
    shutil.copytree(checkout / "megatron", copy / "megatron")
    for script in checkout.glob("*.py"):
        shutil.copy(script, copy)
    patch = [str(ROOT / "scripts" / "patch-megatron.sh"), "apply", str(copy)]
    done = subprocess.run(patch, capture_output=True, text=True, timeout=60)
    if "no patch for" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr("megatron_ft.supervisor.processes.before_script", dict)
    check_identical(stock(copy), megatron_corpus, tmp_path)


def test_without_a_supervisor_the_unedited_script_refuses_the_flag(
    checkout: Path, megatron_corpus: Path, tmp_path: Path
) -> None:
    program = stock(checkout)
    folder = str(startup.FOLDER)
    path = os.pathsep.join([folder, program.environment(tmp_path)["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *program.flags(megatron_corpus, tmp_path), *SNAPSHOTS],
        env={**os.environ, **program.environment(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --inmem-snapshot" in done.stderr
