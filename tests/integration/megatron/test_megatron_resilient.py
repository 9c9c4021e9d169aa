"""A Megatron script that calls ``run_resilient`` itself, around its arguments and all the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_jobs import LONG_JOB, Program, check_identical, installed

pytestmark = [*LONG_JOB, pytest.mark.usefixtures("warm_megatron_trainers")]


def test_a_survivor_restarts_in_process(megatron_corpus: Path, tmp_path: Path) -> None:
    program = Program(("-m", "tests.programs.resilient_megatron"), installed())
    job = check_identical(program, megatron_corpus, tmp_path, restart="in-process")
    kept = [event.fields["in_process"] for event in job.events if event.kind == "trainers_started"]
    assert kept == [[], [0]], job.story()
