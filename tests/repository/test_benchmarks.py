"""The benchmarks run, judge rightly, and what they rely on does not depend on the machine."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.bare
from benchmarks import memory, neighbours, training
from benchmarks.__main__ import VECTORS
from benchmarks.bare import BareCopies
from benchmarks.bookkeeping import DEEPSPEED, MEGATRON
from benchmarks.capturing import SHARED_MEMORY, capturing, tensors
from benchmarks.jobs import Jobs, supervised
from benchmarks.methods import METHODS
from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.comparison import (
    BLOCKED,
    FLUSH,
    KEPT,
    LOAD,
    LOST,
    SAFE,
    SPEED,
    limits,
    measured,
    table,
)
from benchmarks.peers.cycles import cycles
from benchmarks.peers.environment import fingerprint, steps
from benchmarks.peers.jobs import Found, reason
from benchmarks.program import Plan, Training, _phases
from benchmarks.restores import require_right
from benchmarks.table import Row, as_json, markdown
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core import isal
from megatron_ft.core.process_tools import free_port

ROOT = Path(__file__).parents[2]
MEBI = 1 << 20
WAIT = 60.0


def test_a_limit_is_kept_by_the_median() -> None:
    kept = Row("a", (0.5, 1.0, 9.0), "x", 1.0)
    missed = Row("b", (0.5, 1.0, 9.0), "x", 1.1)
    below = Row("c", (1.0, 2.0), "%", 1.5, more=False)
    above = Row("d", (0.5, 2.0, 9.0), "%", 1.5, more=False)
    reported = Row("e", (1.0,))
    rows = (kept, missed, below, above, reported)
    assert [row.met for row in rows] == [True, False, True, False, None]
    assert "| b | 1 x | 0.5 to 9 | 3 | ≥ 1.1 x | **no** |  |" in markdown([kept, missed])
    assert [row["met"] for row in json.loads(as_json([kept, reported], "here"))["rows"]] == [
        True,
        None,
    ]


def test_a_row_without_samples_says_why() -> None:
    row = Row("f", (), "ms", 1.0, more=False, note="not measured: nothing is installed")
    assert row.met is None
    assert "| f |  |  | 0 | ≤ 1 ms |  | not measured: nothing is installed |" in markdown([row])
    (found,) = json.loads(as_json([row], "here"))["rows"]
    assert (found["median"], found["met"]) == (None, None)


@pytest.mark.all_layouts
def test_the_table_is_printed_whole(tmp_path: Path) -> None:
    """The smallest run of what takes no job; its limits mean nothing on so little."""
    command = [sys.executable, "-m", "benchmarks", "capture", "coding", "--mib", "16"]
    command += ["--rounds", "1", "--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (0, 1), ended.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 16 and all(row["median"] > 0 for row in rows)
    assert f"| {rows[0]['name']} |" in ended.stdout
    known = set(Path("/proc/cpuinfo").read_text().split())
    machine, *vectors = ended.stdout.split(", ")[1].split()
    assert machine == platform.machine() and set(vectors) == known & set(VECTORS)


def resident(field: str) -> int:
    """Bytes of this process's memory by proc(5), status."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


@pytest.mark.all_layouts
def test_who_is_ended_early_gets_the_rows_that_there_are(tmp_path: Path) -> None:
    """A machine with a GPU is lent for minutes."""
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "capture", "--mib", "32", "--rounds", "3"]
    command += ["--json", str(rows)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as own:
        watch = threading.Timer(120, own.kill)
        watch.start()
        assert own.stderr is not None and own.stderr.readline(), "no row within 120 s"
        own.terminate()
        own.communicate()
        watch.cancel()
    assert own.returncode == 128 + signal.SIGTERM
    assert [row["name"] for row in json.loads(rows.read_text())["rows"]][:1] == [
        "capture, 16 tensors, 32 MiB"
    ]


def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    """On a machine that is lent once there is no second run."""
    command = [sys.executable, "-m", "benchmarks", "capture", "coding", "--mib", "16"]
    command += ["--rounds", "1", "--arenas", str(tmp_path / "absent")]
    command += ["--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert len(found["failed"]) == 3, "few tensors, many, and many large ones"
    assert len(found["rows"]) == 7 and "capture" not in ended.stdout, "coding alone"
    assert "Not measured, at the beginning: FileNotFoundError: " in ended.stdout


@pytest.mark.all_layouts
def test_what_takes_milliseconds_has_three_turns_a_round() -> None:
    """A shared machine copies at half its speed for longer than one of them takes."""
    rows = [row for part in memory.parts(16, 2, "cpu", SHARED_MEMORY) for row in part]
    assert {row.name: len(row.samples) for row in rows} == {row.name: 6 for row in rows}


@pytest.mark.all_layouts
def test_a_job_that_takes_too_long_costs_no_other() -> None:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "training", "--mib", "16", "--rounds", "1"]
        command += ["--arenas", folder, "--job-seconds", "0.01"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1, ended.stderr
        jobs = 9 + sum(program.installed for program in (DEEPSPEED, MEGATRON))
        assert ended.stdout.count("no end within 0.01 s") == jobs, ended.stdout
        assert not os.listdir(folder)


@pytest.mark.all_layouts
def test_a_benchmark_that_is_ended_leaves_no_job_behind() -> None:
    """The SMP of a job that has not finished would keep the memory for a next incarnation."""
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "training", "--mib", "16", "--rounds", "500"]
        command += ["--arenas", folder]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as own:
            try:
                until_some(lambda: processes(folder, "megatron_ft.smp"), "an SMP")
                until_some(lambda: list(Path(folder).glob("*/arenas/*/*/*.arena")), "an arena")
                own.terminate()
                table, _ = own.communicate(timeout=WAIT)
            finally:
                own.kill()
        assert own.returncode == 128 + signal.SIGTERM and "| what |" in table
        assert not processes(folder, "")
        assert not os.listdir(folder)


UNEVEN = """
import torch.distributed as dist
from benchmarks.methods import TorchSave
from benchmarks.program import Plan, Training
class Uneven(TorchSave):
    decides = True
    def __init__(self): pass
    def idle(self): pass
    def save(self, iteration, state): return iteration % (20 if dist.get_rank() else 3) == 0
dist.init_process_group("gloo")
plan = Plan("", tensors=2, mib=1, work=0.5, rounds=1, phase=8, out="", folder="")
training = Training(plan, Uneven())
print(len(training.phase(8, True)))
training.iteration = 0
training.single()
print(training.iteration)
dist.destroy_process_group()
"""


@pytest.mark.all_layouts
def test_ranks_that_save_unevenly_go_on_together() -> None:
    """Whoever continued alone would wait for the other for ever."""
    port, command = str(free_port()), [sys.executable, "-c", UNEVEN]
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**common, "RANK": rank})
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=WAIT)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Six turn to the phase; behind the second save of whoever saves least follows one more.
    assert said == [[b"35", b"60"]] * 2


def processes(folder: str, program: str) -> list[int]:
    """Those that run ``program``, as far as their command lines or variables name the folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv, variables = ((one / name).read_bytes() for name in ("cmdline", "environ"))
            if program.encode() in argv and folder.encode() in argv + variables:
                found.append(int(one.name))
    return found


def until_some(find: Callable[[], list[Any]], what: str) -> list[Any]:
    deadline = time.monotonic() + WAIT
    while not (found := find()):
        assert time.monotonic() < deadline, f"no sign of {what} within {WAIT} s"
        time.sleep(0.05)
    return found


FAULTS = """
import resource
from pyeclib.ec_iface import ECDriver
from benchmarks.coding import _keep_freed_memory
driver, blob = ECDriver(k=8, m=2, ec_type="isa_l_rs_cauchy"), bytes(8 << 20)
_keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
driver.encode(blob)
before = faults()
driver.encode(blob)
print(faults() - before)
"""


def test_what_is_compared_with_ours_need_not_wait_for_pages() -> None:
    """In a fresh process an encode of 8 MiB would take 2,560 new pages at least, and most time."""
    command = [sys.executable, "-c", FAULTS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert int(ended.stdout) < 1000, ended


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-m", "benchmarks", "--device", "cuda"], "sees no GPU here"),
        (["benchmarks/gpu.sh"], "has no torch that sees a GPU (AssertionError: torch "),
    ],
)
def test_a_gpu_that_is_missing_is_said_in_a_line(command: list[str], said: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr and ended.stderr.count("\n") == 1


def test_a_copy_that_brings_other_bytes_gives_no_figures() -> None:
    with capturing(tensors(3, 8, "cpu")) as captures:
        captures.once()
        require_right(captures)
        captures.state.tensors()["w1"][7] += 1.0
        with pytest.raises(RuntimeError, match="w1 was not copied as it is"):
            require_right(captures)


def test_a_capture_takes_no_memory_beside_its_arena() -> None:
    """Neither to keep nor for a moment; and no byte of the state is copied twice."""
    state = tensors(4, 64, "cpu")
    with capturing(state) as captures:
        captures.once()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the most so far, begins anew
        before = resident("VmHWM")
        runs = [captures.once() for _ in range(3)]
        grown, more = resident("VmRSS") - before, resident("VmHWM") - before
    assert [run.copied_bytes for run in runs] == [64 * MEBI] * 3
    assert grown < 2 * MEBI, f"three captures of 64 MiB left {grown} bytes more"
    assert more < 2 * MEBI, f"a capture of 64 MiB took {more} bytes more for a while"


def test_a_copy_beside_an_iteration_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    plan = Plan("torch.save", 1, 1, 0.1, 1, 1, "", str(tmp_path), copies=True)
    ours = Training(plan, METHODS["torch.save"](tmp_path))
    monkeypatch.setattr(ours, "copied", lambda: 1e6)
    one = ours.iterate(True)
    assert one["saved"] and one["copy"] == 1e6
    assert -1e6 <= one["total"] < 0, "seconds that were told, and not spent, are taken off"


def test_a_stall_is_measured_by_a_copy_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the machine copies at half its speed, a fence and the yardstick take twice as long."""

    def iteration(copy: float, fence: float) -> dict[str, float]:
        return {"copy": copy, "work": 0.5, "save": 0.01, "fence": fence, "saved": 1.0}

    phase = [iteration(1.0, 0.0), iteration(2.0, 0.5), iteration(2.0, 1.5), iteration(1.0, 1.5)]
    monkeypatch.setattr(training, "_run", lambda *_, **__: {"copy": 1.0, "phases": [[], phase]})
    jobs = Jobs(7, "cpu", Path("/dev/shm"), 600.0)
    (row,) = training._short(512, jobs)
    assert row.samples == pytest.approx((1.0, 0.5, 0.5))


def iteration(total: float, save: float, saved: bool) -> dict[str, float]:
    return {"total": total, "save": save, "saved": float(saved), "fence": 0.001, "work": 0.8}


def test_a_shadow_with_a_limit_is_that_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save counts with the iteration that it slows down, which is the next one."""
    saving, slowed = iteration(0.9, 0.1, True), iteration(1.0, 0.0, False)
    measured: dict[str, Any] = {}

    def run(*_: Any, control: bool = False, **plan: Any) -> dict[str, Any]:
        measured.update(plan)
        pairs = plan["phase"] // plan["every"]
        return {
            "phases": [
                [iteration(0.8, 0.0, False)] * 2 * pairs if control else [saving, slowed] * pairs
            ]
        }

    monkeypatch.setattr(training, "_run", run)
    jobs = Jobs(7, "cpu", Path("/dev/shm"), 600.0)
    stall, shadow = training._one_rank(512, jobs)
    assert (measured["every"], measured["phase"]) == (2, 2 * 28 * 7)
    assert stall.samples == pytest.approx((100 * 0.101 / 0.9,) * 28 * 7)
    # With a save 0.1 + 1.0, without 0.9 - 0.1; no span follows the last iteration.
    assert shadow.samples == pytest.approx((0.8 / 1.1,) * (28 * 7 - 1))
    assert (shadow.limit, shadow.note) == (0.98, "neighbours; all together 0.727")
    (bare,) = training._bare(512, jobs)
    assert (bare.samples, bare.limit) == (shadow.samples, None)
    (control,) = training._control(512, jobs)
    assert (set(control.samples), control.limit) == ({1.0}, None)


def test_only_neighbours_of_both_kinds_are_compared() -> None:
    """A snapshot that was missed leaves two without a save beside one another."""
    saved = [False, False, True, True, False, False, True, False]
    phase = [iteration(float(number), 0.0, save) for number, save in enumerate(saved)]
    # The one that follows a save is slowed down: numbers 2 with 3, 5 with 4, 6 with 7.
    assert neighbours.seconds(phase, False) == [(2.0, 3.0), (5.0, 4.0), (6.0, 7.0)]
    assert neighbours.seconds(phase, True) == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    with pytest.raises(RuntimeError, match="no snapshot was taken"):
        neighbours.seconds(phase[:3], False)


def test_bare_copies_are_whole_before_a_fence_and_digested_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested = benchmarks.bare.digested

    def slowly(copied: isal.Bytes) -> list[int]:
        time.sleep(0.1)  # longer than what follows the fence
        return digested(copied)

    monkeypatch.setattr(benchmarks.bare, "digested", slowly)
    state = {f"w{i}": torch.rand(32 * BLOCK_BYTES // 4 + i) for i in range(3)}
    bare = BareCopies(tmp_path)
    for iteration in (1, 2):
        assert bare.save(iteration, state)
        bare.fence()
        copies = [torch.from_numpy(copied).view(torch.float32) for copied in bare.copies]
        assert all(map(torch.equal, copies, state.values()))
        for tensor in state.values():
            tensor += 1
        bare.settle()
        assert bare.digests == [
            [isal.crc64(copied[at : at + BLOCK_BYTES]) for at in range(0, copied.size, BLOCK_BYTES)]
            for copied in bare.copies
        ]
    bare.close()


@pytest.mark.parametrize("control", [False, True])
def test_a_control_saves_in_no_phase(control: bool) -> None:
    asked: list[tuple[int, bool]] = []

    def phase(iterations: int, saves: bool) -> neighbours.Phase:
        asked.append((iterations, saves))
        return [iteration(1.0, 0.0, saves)]

    recorder: Any = SimpleNamespace(phase=phase)
    plan = Plan("inmem", 2, 1, 0.5, rounds=2, phase=3, out="", folder="", control=control)
    measured = _phases(plan, recorder)
    # What comes first is no part of what is measured.
    assert asked == [(3, False), (3, not control)] * 3
    assert [one["saved"] for (one,) in measured] == [0.0, float(not control)] * 2


@pytest.mark.all_layouts
@pytest.mark.slow
def test_a_job_saves_in_every_second_phase() -> None:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        jobs = Jobs(2, "cpu", Path(folder), 240.0)
        small = {"tensors": 2, "mib": 1, "work": 0.5, "phase": 2}
        measured = training._run(1, jobs, method="inmem", **small)
    saved = [any(one["saved"] for one in phase) for phase in measured["phases"]]
    # A job that hears late of a pause may save in a phase that is to have none.
    assert saved[1::2] == [True] * 2


@pytest.mark.all_layouts
def test_bare_copies_are_made_in_every_second_iteration(tmp_path: Path) -> None:
    jobs = Jobs(1, "cpu", tmp_path, 240.0)
    small = {"tensors": 2, "mib": 1, "work": 8, "phase": 40, "every": 2}
    (phase,) = training._run(1, jobs, method="bare", **small)["phases"]
    assert [bool(one["saved"]) for one in phase] == [True, False] * 20


TOLD = """
import json, os, sys
from pathlib import Path
out, interval = json.loads(sys.argv[1])["out"], os.environ["MEGATRON_FT_SNAPSHOT_INTERVAL"]
Path(out).write_text(interval)
"""


@pytest.mark.all_layouts
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "interval"), [({}, 1), ({"every": 2}, 2)])
def test_a_job_is_told_how_often_to_save(
    plan: dict[str, Any], interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instead(program: list[str], *others: Any) -> None:
        supervised([sys.executable, "-c", TOLD, program[-1]], *others)

    monkeypatch.setattr(training, "supervised", instead)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        jobs = Jobs(1, "cpu", Path(folder), 240.0)
        assert training._run(1, jobs, method="inmem", tensors=1, mib=1, work=1, **plan) == interval


COPY = 2.0


def found(
    way: str,
    speed: float,
    blocked: float,
    saved: float = 2.0,
    safe: float | None = None,
    load: float = 1.2,
    **more: Any,
) -> Found:
    """A job with copies of two seconds, in which times are told, and two saves in each phase."""
    pairs = tuple({"off": 20.0, "on": 20.0 / speed, "saved": saved} for _ in range(3))
    times = {"blocked": blocked, "safe": blocked + 2 if safe is None else safe}
    single = {"copy": COPY, **{figure: COPY * time for figure, time in times.items()}}
    loads = ({"copy": COPY, "load": COPY * load, "right": True},)
    return Found(way, pairs, (single,) * 3, loads, **more)


def test_peers_that_are_ahead_stand_in_bold() -> None:
    jobs = [found("ours", 0.9, 1.0), found("torch.save", 0.8, 6.0), found("dlrover", 0.95, 0.99)]
    entries = measured(jobs, 2)
    lines = table(entries).splitlines()
    assert "**" not in lines[3], "torch.save is behind us everywhere"
    assert "| **0.95** | **0.263** | 100% | 0.99 |" in lines[4]
    ahead = {row.name: row.note for row in limits(entries) if row.met is False}
    assert set(ahead) == {"peers ahead of us: " + name for name in (SPEED, LOST)}
    assert set(ahead.values()) == {"DLRover 0.6.1, flash checkpoint"}


@pytest.mark.parametrize("over", [False, True])
def test_each_limit_is_in_copies_of_the_state(over: bool) -> None:
    more = 1.01 if over else 0.99
    ours = found("ours", 0.9, 1.05 * more, safe=4.1 * more, load=1.5 * more, flushes=(float(over),))
    judged = {row.name: row.met for row in limits(measured([ours], 2)) if row.unit == "copies"}
    assert judged == dict.fromkeys((BLOCKED, SAFE, LOAD, FLUSH), not over)


def test_saves_kept_are_no_lead() -> None:
    jobs = [found("ours", 0.9, 1.0, saved=1.0), found("torch.save", 0.8, 6.0)]
    lines = table(measured(jobs, 2)).splitlines()
    assert "| 50% |" in lines[2] and "| 100% |" in lines[3]


def test_speed_with_fewer_saves_than_asked_for_is_said_to_be_such() -> None:
    jobs = [found("ours", 0.9, 1.0), found("torch.save", 0.8, 6.0)]
    notes = {row.name: row.note for row in limits(measured(jobs, 4))}
    assert notes["peers ahead of us: " + SPEED] == "ours with 50% of the saves"
    assert notes["peers ahead of us: " + LOST] == ""


def test_what_must_be_flushed_counts_in_copies() -> None:
    entry = measured([found("lm-resiliency", 0.9, 1.0, flushes=(31 * COPY,))], 2)[0]
    assert entry.median(FLUSH) == 31.0 and entry.median(KEPT) == 1.0


def test_ours_without_protection_is_no_peer_of_ours() -> None:
    """It is there to compare with those that do as little; the limits are for what protects."""
    jobs = [found("ours", 0.9, 1.0), found("ours-none", 0.99, 0.9, load=1.0), found("none", 1, 0)]
    entries = measured(jobs, 2)
    assert "**" not in table(entries).splitlines()[3].replace("**megatron-ft**", "")
    assert {row.met for row in limits(entries)} == {True}
    assert [row.samples for row in limits(entries)] == [
        row.samples for row in limits(measured(jobs[:1], 2))
    ]


def test_a_peer_that_does_not_run_says_why() -> None:
    log = "[rank1]: Traceback\n[rank1]: AssertionError: no CUDA\n[rank0]: RuntimeError: peer gone\n"
    assert reason(log) == "AssertionError: no CUDA"
    assert reason("torch.nn.SomeError: x") == "torch.nn.SomeError: x"
    assert reason("all is well: no error") == reason("errors: none") == ""
    entries = measured([Found("nvrx-async", why=reason(log)), found("ours", 0.9, 1.0)], 2)
    assert "| does not run here: AssertionError: no CUDA |" in table(entries)


def test_wrong_values_are_not_hidden_by_later_jobs() -> None:
    wrong = Found("torch.save", loads=({"copy": 1.0, "load": 1.0, "right": False},))
    assert "**wrong values loaded**" in table(measured([wrong, found("torch.save", 1, 1)], 2))


def test_cycles_end_before_the_time_does() -> None:
    """With cycles of 40 s, two fit into 90 s; a way that failed is not tried again."""
    now = [0.0]
    tried = []

    def job(way: str) -> Found:
        tried.append(way)
        now[0] += 20
        return Found(way, why="no" if way == "dlrover" else "")

    count, jobs = cycles(["ours", "dlrover"], job, 90, lambda: now[0])
    assert count == 2 and [one.way for one in jobs] == tried == ["ours", "dlrover", "ours"]


def test_every_way_names_a_class_of_the_benchmarks() -> None:
    for way in WAYS.values():
        module, name = way.home.split(":")
        source = (ROOT / "benchmarks" / "peers" / f"{module}.py").read_text()
        assert f"class {name}(" in source


def test_peers_are_pinned_and_torch_comes_first() -> None:
    first, *others = steps()
    assert len(first) == 1 and first[0].startswith("torch==")
    assert all("==" in word or word == "--no-deps" for call in others for word in call)
    assert fingerprint([first]) != fingerprint([first, first])
