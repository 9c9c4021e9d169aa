"""Exit codes of trainers whose next start would end alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.core.startup import REFUSED, UNAVAILABLE, before_script, sitecustomize
from tests.support.jobs import ROOT

RAISE = "from megatron_ft.core import errors\nraise errors.{}('this is why')"
WRAPPED = """
import io, sys
before = sys.excepthook
def hook(*args):
    # As torch.distributed.init_process_group does it.
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        before(*args)
    finally:
        sys.stderr = stderr
sys.excepthook = hook
"""


class ChildFailedError(Exception):
    """As torchrun raises it."""

    def get_first_failure(self) -> tuple[int, object]:
        return 0, type("Failure", (), {"exitcode": self.args[0]})


def ended(*words: str, folder: Path) -> tuple[int, str]:
    """Exit code and errors of Python as a trainer runs it."""
    environment = before_script({**os.environ, "PYTHONPATH": str(ROOT)})
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, timeout=60.0, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import no_such_module", UNAVAILABLE),
        ("def broken(:", UNAVAILABLE),
        (RAISE.format("ConfigError"), REFUSED),
        (RAISE.format("UnencodableError"), REFUSED),
        (WRAPPED + RAISE.format("UsageError"), REFUSED),
        (RAISE.format("ControlPlaneError"), 1),
        ("raise ValueError('this is why')", 1),
        ("raise SystemExit(5)", 5),
        ("", 0),
    ],
)
def test_an_error_that_comes_again_has_a_code_of_its_own(
    tmp_path: Path, script: str, code: int
) -> None:
    (tmp_path / "train.py").write_text(script)
    status, errors = ended("train.py", folder=tmp_path)
    assert status == code
    assert ("this is why" in errors) == ("this is why" in script)


def test_a_module_that_is_missing_has_it_too(tmp_path: Path) -> None:
    status, errors = ended("-m", "no_such_module", folder=tmp_path)
    assert status == UNAVAILABLE and "No module named no_such_module" in errors
    (tmp_path / "train.py").write_text("raise SystemExit('text')")
    assert ended("-m", "train", folder=tmp_path) == (1, "text\n")


@pytest.mark.parametrize(("code", "expected"), [(REFUSED, REFUSED), (1, 0), (-9, 0)])
def test_torchrun_ends_as_its_first_rank(code: int, expected: int) -> None:
    assert sitecustomize.code_of(ChildFailedError(code)) == expected
    assert (sitecustomize.REFUSED, sitecustomize.UNAVAILABLE) == (REFUSED, UNAVAILABLE)
