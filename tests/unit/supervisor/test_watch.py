"""Pure decisions of the watch: silences, blame; and the heartbeats they rest on."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import SnapshotConfig
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc.heartbeat_page import (
    FILE_BYTES,
    Pulse,
    PulseFile,
    PulseReport,
    TrainerPhase,
    pulse_path,
    read_pulse,
    stacks_path,
)
from megatron_ft.smp.heartbeats import NodeHeartbeats
from megatron_ft.smp.processes import WriterProcess, Writers
from megatron_ft.supervisor.autopsy import LOADER, LOCKED, SUSPENDED
from megatron_ft.supervisor.watch import (
    HANG_FACTOR,
    PAUSE_SECONDS,
    Frame,
    Witness,
    allowance,
    blame,
    is_locked,
    learned_timeout,
    main_thread,
    of_training,
    waits_for_others,
)
from megatron_ft.trainer.heartbeats import FIRST_ITERATIONS, WORK_WINDOW, Iterations, TrainerWatch

SECONDS = st.floats(0, 1e4)
SETTINGS = st.builds(
    SnapshotConfig, hang_seconds=st.floats(0.1, 1e4), register_timeout_seconds=st.floats(0.1, 1e4)
)


@given(st.lists(SECONDS), SECONDS, SETTINGS)
def test_a_silence_that_was_seen_is_no_hang(
    seen: list[float], another: float, settings: SnapshotConfig
) -> None:
    learned = learned_timeout(max([*seen, another]), settings)
    assert learned >= settings.hang_seconds
    assert learned >= HANG_FACTOR * another
    # What was learned is never unlearned.
    assert learned >= learned_timeout(max(seen, default=0.0), settings)
    for phase in (TrainerPhase.TRAINING, TrainerPhase.PAUSED, TrainerPhase.ENDED):
        assert allowance(phase, 1000, learned, settings) >= another


@given(SECONDS, SETTINGS, st.integers(0, 10_000))
def test_more_time_for_first_iterations_and_pauses(
    learned: float, settings: SnapshotConfig, done: int
) -> None:
    usual = allowance(TrainerPhase.TRAINING, FIRST_ITERATIONS, learned, settings)
    assert usual == learned
    assert (
        allowance(TrainerPhase.TRAINING, FIRST_ITERATIONS - 1, learned, settings)
        >= settings.register_timeout_seconds
    )
    assert allowance(TrainerPhase.PAUSED, done, learned, settings) >= max(learned, PAUSE_SECONDS)
    assert allowance(TrainerPhase.ENDED, done, learned, settings) == float("inf")
    assert (
        allowance(TrainerPhase.STARTING, done, learned, settings)
        <= settings.register_timeout_seconds
    )


def run(lengths: Sequence[float]) -> Iterations:
    """A rank whose iterations take so long."""
    iterations, now = Iterations(), 0.0
    for seconds in lengths:
        now += seconds
        iterations.step(now)
        iterations.ended(now)
    return iterations


@given(st.lists(st.floats(1e-3, 10), min_size=FIRST_ITERATIONS + 1, max_size=80))
def test_the_longest_silence_leaves_out_the_first_iterations(lengths: list[float]) -> None:
    found = run(lengths)
    assert found.longest == pytest.approx(max(lengths[FIRST_ITERATIONS:]))
    assert found.done == len(lengths) and found.marks == 2 * len(lengths)


def test_the_work_of_a_rank_is_what_it_does_not_wait() -> None:
    iterations, waited = Iterations(), 0.0
    for number in range(FIRST_ITERATIONS + WORK_WINDOW):
        assert iterations.work == 0.0, "not enough are known"
        waited += 100.0 if number < FIRST_ITERATIONS else 0.3
        waited += 0.5 if number % 8 == 7 else 0.0  # once in a while others are late
        iterations.ended(float(number), waited)
    assert iterations.work == pytest.approx(0.7)
    iterations.disturbed(90.0)
    iterations.ended(99.0, waited)
    assert iterations.work == pytest.approx(0.7)


def test_a_pause_teaches_nothing() -> None:
    iterations = run([1.0] * 10)
    iterations.disturbed(10.1)
    iterations.disturbed(500.0)
    iterations.ended(500.5)
    assert iterations.longest == 1.0
    assert iterations.typical == pytest.approx(1.0)


WITNESSES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from("SSRDT"),
        st.sampled_from("ab"),
        st.sampled_from([True, False, None]),
    ),
    min_size=1,
    max_size=6,
)


@given(WITNESSES)
def test_somebody_is_always_blamed_and_never_who_is_ahead(
    drawn: list[tuple[int, str, str, bool | None]],
) -> None:
    witnesses = [
        Witness(rank, marks, state, Frame("train.py", 1, function), waits)
        for rank, (marks, state, function, waits) in enumerate(drawn)
    ]
    ranks, reason = blame(witnesses)
    assert ranks and reason
    blamed = [w for w in witnesses if w.rank in ranks]
    suspended = [w for w in witnesses if w.state == "T"]
    if suspended:
        assert blamed == suspended
    else:
        assert {w.marks for w in blamed} == {min(w.marks for w in witnesses)}


@pytest.mark.parametrize(
    ("witnesses", "ranks"),
    [
        ([Witness(0, 9, "S"), Witness(1, 8, "S"), Witness(2, 9, "S")], (1,)),
        ([Witness(0, 8, "T"), Witness(1, 7, "S")], (0,)),
        ([Witness(0, 8, "S", waits=True), Witness(1, 8, "R", waits=False)], (1,)),
        ([Witness(0, 8, "S", waits=None), Witness(1, 8, "S", waits=True)], (0, 1)),
        (
            [
                Witness(0, 8, "S", Frame("train.py", 1, "train"), waits=True),
                Witness(1, 8, "S", Frame("train.py", 9, "barrier"), waits=True),
                Witness(2, 9, "S", Frame("train.py", 2, "train"), waits=True),
            ],
            (1,),
        ),
        ([Witness(0, 8, "S", waits=None, locked=True), Witness(1, 8, "S", waits=True)], (0,)),
        ([Witness(0, 8, "S", waits=None, locked=True), Witness(1, 8, "S", waits=False)], (1,)),
    ],
    ids=["behind", "suspended", "in no collective", "unknown", "apart", "locked", "not alone"],
)
def test_blame(witnesses: list[Witness], ranks: tuple[int, ...]) -> None:
    assert blame(witnesses)[0] == ranks


STACKS = """Thread 0x00007f4fef7fe6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f502ac38b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5 in barrier
  File "/home/me/train one.py", line 79 in train_one
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_main_threads_stack_is_read() -> None:
    frames = main_thread(STACKS)
    assert waits_for_others(frames) is True
    assert [str(frame) for frame in of_training(frames)] == ["train_one (/home/me/train one.py:79)"]
    assert waits_for_others(frames[1:]) is False
    assert waits_for_others(main_thread("")) is None


LOADING = """Current thread 0x00007f502ac38b80 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1243 in _get_data
  File "/home/me/train.py", line 40 in next_batch
"""


@pytest.mark.parametrize(
    ("state", "stacks", "locked", "how"),
    [
        ("S", LOADING, False, LOADER),
        ("T", LOADING, True, SUSPENDED),
        ("R", LOADING, True, LOCKED),
        ("S", STACKS, False, ""),
        ("S", STACKS + LOADING.partition("\n")[2], False, ""),
        ("D", "", True, ""),
    ],
    ids=["loader", "suspended", "locked", "collective", "collective of a loader", "frozen"],
)
def test_how_a_rank_hangs(state: str, stacks: str, locked: bool, how: str) -> None:
    assert Witness.of(0, 8, state, stacks, locked=locked).how == how


def test_a_late_thread_is_no_locked_interpreter() -> None:
    assert is_locked(quiet=3.1, idle=3.0) and is_locked(quiet=601.0, idle=600.5)
    assert not is_locked(quiet=1.9, idle=3.0), "two beats"
    assert not is_locked(quiet=200.0, idle=600.0), "a machine that was busy for minutes"


EXPLAINED = """Current thread 0x00007f502ac38b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/venv/lib/megatron_ft/trainer/resilient.py", line 150 in explains
  File "/venv/lib/megatron_ft/trainer/resilient.py", line 83 in run_resilient
  File "/home/me/train.py", line 90 in <module>
"""


def test_who_waits_for_a_restart_waits_for_others() -> None:
    """The rank that failed writes no stacks while its interpreter ends."""
    ranks = [Witness.of(rank, 8, "S", EXPLAINED) for rank in (0, 2)]
    assert blame([*ranks, Witness.of(1, 8, "R", "", locked=True)])[0] == (1,)


@given(st.text(max_size=300))
def test_any_text_can_be_read_as_stacks(text: str) -> None:
    Witness.of(0, 0, "S", text)


@pytest.fixture
def environment(tmp_path: Path) -> ProcessEnvironment:
    tmp_path.chmod(0o700)
    return ProcessEnvironment("job", "n0", tmp_path, 1)


def test_a_pulse_is_read_as_it_was_stored_or_not_at_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = pulse_path(tmp_path, 5)
    assert read_pulse(path) is None
    file, pulse = PulseFile(path), PulseReport(rank=3, iteration=7, typical=0.5, first=1.5)
    assert read_pulse(path) is None
    file.store(pulse)
    file.beat(12.5, 0.25)
    pulse.beat, pulse.work = 12.5, 0.25
    assert read_pulse(path) == pulse
    with path.open("r+b") as raw, mmap.mmap(raw.fileno(), FILE_BYTES) as torn:
        torn[0] += 1  # a store has begun
        assert read_pulse(path) is None
    path.write_bytes(b"short")
    assert read_pulse(path) is None


def test_a_trainer_beats_writes_its_stacks_and_ends(environment: ProcessEnvironment) -> None:
    watch = TrainerWatch.start(environment, 2)
    path = pulse_path(environment.node_dir, os.getpid())
    watch.training()
    with watch.pause():
        assert read_pulse(path).phase == TrainerPhase.PAUSED  # type: ignore[union-attr]
    watch.iteration_ended(1)
    pulse = read_pulse(path)
    assert pulse is not None and pulse.dumps and pulse.phase == TrainerPhase.TRAINING
    assert (pulse.rank, pulse.iteration, pulse.marks) == (2, 1, 2)
    assert 0 < pulse.first == pulse.marked <= time.monotonic()
    deadline = time.monotonic() + 10
    while not read_pulse(path).beat:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "the thread has not run"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGRTMIN + 9)
    text = (environment.node_dir / f"stacks-{os.getpid()}").read_text()
    assert any("writes_its_stacks" in frame.function for frame in main_thread(text))
    watch.iteration_ended(2)
    later = read_pulse(path)
    assert later is not None and later.first == pulse.first < later.marked
    watch.close()
    assert read_pulse(path).phase == TrainerPhase.ENDED  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGRTMIN + 9)  # ends nobody
    watch.iteration_ended(2)


def test_training_goes_on_where_nothing_can_be_stored(environment: ProcessEnvironment) -> None:
    environment.node_dir.chmod(0o777)
    watch = TrainerWatch.start(environment, 0)
    watch.training()
    watch.step()
    watch.iteration_ended(1)
    watch.close()


@pytest.fixture
def gone(environment: ProcessEnvironment) -> WriterProcess:
    """A trainer's registration, outlived by the files that it has written."""
    pulse = PulseFile(pulse_path(environment.node_dir, 5))
    pulse.store(
        Pulse(rank=3, phase=TrainerPhase.TRAINING, iteration=17, marks=40, done=7, marked=1.0)
    )
    pulse.beat(2.0)
    pulse.close()
    stacks = stacks_path(environment.node_dir, 5)
    stacks.write_text("Current thread (most recent call first):\n")
    stacks.chmod(0o600)
    return WriterProcess("trainer", "dp0", 5, 0, b"")


def test_where_a_crashed_trainer_was_is_logged(
    environment: ProcessEnvironment, gone: WriterProcess, caplog: pytest.LogCaptureFixture
) -> None:
    watch = NodeHeartbeats(environment.node_dir, Writers(environment.node_dir, lambda _: None))
    watch.ended(gone)
    assert "rank 3 (dp0, pid 5) ended after iteration 17" in caplog.text
    assert not {path.name for path in environment.node_dir.iterdir()} & {"pulse-5", "stacks-5"}


def test_pulses_that_say_nothing_end_no_smp(environment: ProcessEnvironment) -> None:
    watch = NodeHeartbeats(environment.node_dir, Writers(environment.node_dir, lambda _: None))
    pulse = PulseFile(pulse_path(environment.node_dir, 7))
    pulse.store(Pulse(phase=77, marked=float("nan")))
    pulse.close()
    for who, pid in (("dp0", 7), ("dp0", 8), ("x" * 300, 9), ("a/b", 7)):
        watch.ended(WriterProcess("trainer", who, pid, 0, b""))
