"""Ends of processes: exit codes whose next start would end alike, and what is quoted of a log."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from megatron_ft.core.errors import explain
from megatron_ft.core.process_tools import last_lines, last_word, log_size
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


def test_an_error_without_a_text_is_explained_by_its_place() -> None:
    try:
        assert explain is None
    except AssertionError as caught:
        error = AssertionError().with_traceback(caught.__traceback__)
    text = explain(error)
    assert text.startswith("AssertionError: in test_an_error_without") and f"{__file__}:" in text
    assert explain(ValueError()) == "ValueError: no reason given"
    assert explain(ValueError("x")) == "ValueError: x"


STEP_ENDED = "srun: error: n3: task 0: Exited with exit code 1"


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("".join(f"line {i}\n" for i in range(40)))
    assert last_lines(log) == "\n".join(f"line {i}" for i in range(25, 40))
    assert last_lines(log, 1) == "line 39"


def test_a_log_of_gigabytes_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    with log.open("wb") as file:
        file.seek(8 << 30)
        file.write(b"\nthe cause\n")
    tracemalloc.start()
    try:
        assert last_lines(log, 1) == last_word(log) == "the cause"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_log_that_cannot_be_read_is_no_error(tmp_path: Path, name: str) -> None:
    assert last_lines(tmp_path / name).startswith("(no log at ")
    assert last_word(tmp_path / name).startswith("(no log at ")


def test_the_last_word_is_that_of_the_process_and_not_of_srun(tmp_path: Path) -> None:
    log = tmp_path / "smp-n3.log"
    log.write_text(f"starting\nERROR no room\n\n{STEP_ENDED}\n")
    assert last_word(log) == "ERROR no room"
    log.write_text(f"{STEP_ENDED}\n")
    assert last_word(log) == STEP_ENDED, "nothing else is known"
    log.write_text("")
    assert last_word(log) == ""
    log.write_text(f"{'-' * 76}\nwill terminate the job.\n{'-' * 76}\n\0")
    assert last_word(log) == "will terminate the job.", "mpirun ends a report so"
    code = "   Process name: [prterun-n0-1@1,3]\n   Exit code:    14\n"
    log.write_text(
        f"ERROR a peer is gone\n{'-' * 76}\nprterun detected that one\n\n{code}{'-' * 76}\n"
    )
    assert last_word(log) == "ERROR a peer is gone"


def test_what_an_earlier_process_wrote_is_not_quoted(tmp_path: Path) -> None:
    log = tmp_path / "drain-n0.log"
    assert log_size(log) == 0
    log.write_text("wrote 121096 bytes of iteration 4\n")
    before = log_size(log)
    assert last_word(log, before) == f"it wrote nothing to {log}"
    with log.open("a") as file:
        file.write("srun: error: Unable to create step for job 5: Job is completing\n")
    assert last_word(log, before).startswith("srun: error: Unable"), "nobody else said anything"
