"""What messages quote of a log: its end, whatever its size, and whose words they are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from megatron_ft.core.process_tools import last_lines, last_word, log_size

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
