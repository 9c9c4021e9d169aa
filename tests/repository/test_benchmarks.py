"""The benchmarks run, judge rightly, and what they rely on does not depend on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import benchmarks.bare
from benchmarks import bookkeeping, neighbours, training
from benchmarks.bare import BareCopies
from benchmarks.capturing import capturing, tensors
from benchmarks.frameworks.save_calls import WARM_UP, SaveCalls
from benchmarks.jobs import Jobs
from benchmarks.peers.catalogue import WAYS
from benchmarks.peers.comparison import (
    BLOCKED,
    FLUSH,
    LOAD,
    LOST,
    SAFE,
    SPEED,
    limits,
    measured,
    table,
)
from benchmarks.peers.environment import fingerprint, steps
from benchmarks.peers.jobs import Found, reason
from benchmarks.reshape import rank as reshape_rank
from benchmarks.reshape.measure import Checkpointed, Reshaped, report
from benchmarks.restart import table as restart_table
from benchmarks.restart.runs import Restart
from benchmarks.restores import require_right
from benchmarks.table import Row, as_json, markdown
from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.core import isal
from megatron_ft.supervisor.heartbeats import PARTS
from megatron_ft.trainer.manager import SnapshotManager
from tests.support.captures import FakeSmp, capture, make_manager

ROOT = Path(__file__).parents[2]
MEBI = 1 << 20


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


def resident(field: str) -> int:
    """Bytes of this process's memory by proc(5), status."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


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


def test_ratios_are_of_one_round_and_say_which_starts_are_in_them() -> None:
    theirs = [Checkpointed(1.0, 6.0, 3.0), Checkpointed(2.0, 12.0, 6.0), Checkpointed(1, 7, 1)]
    ours = [Reshaped(0.5, 1.0, 5.0), Reshaped(1.5, 2.0, 8.0), Reshaped(0.5, 1.0, 6.0)]
    rows = {row.name: row for row in report(theirs, ours, "x")}
    whole = rows["DCP's save, start and load over the reshape"]
    assert (whole.samples, whole.limit, whole.met) == ((10.0, 10.0, 9.0), 10.0, True)
    assert rows["DCP's save and load over the reshape"].samples == (4.0, 4.0, 2.0)
    assert rows["DCP's save, start and load over all from the loss"].samples == (2.0, 2.5, 1.5)
    assert rows["of it: memory of arenas made, tensors loaded"].samples == (0.5, 0.5, 0.5)


def test_what_was_loaded_wrongly_gives_no_figures() -> None:
    plan = reshape_rank.Plan("dcp", "", mib=1, savers=4, tensors=3)
    for rank in (0, 2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        try:
            mesh = init_device_mesh("cpu", (3,))
            reshape_rank.require_right(plan, state := reshape_rank.build(plan, mesh, saved=True))
            assert state["w0"].shape == (plan.rows, 1024)
            state["w2"].to_local()[-1, 7] += 1
            with pytest.raises(RuntimeError, match="w2 was not loaded as it was saved"):
                reshape_rank.require_right(plan, state)
            with pytest.raises(RuntimeError, match="w0 was not"):
                reshape_rank.require_right(plan, reshape_rank.build(plan, mesh, saved=False))
        finally:
            torch.distributed.destroy_process_group()


ROOT = Path(__file__).parents[2]


def restart(seconds: float | None, **changes: Any) -> Restart:
    parts = dict(zip(PARTS, (0.01, 0.02, 0.1, 0.1, 0.9, 0.2), strict=True))
    usual: dict[str, Any] = {"parts": parts, "starts": {"in process": 3, "warm": 1}, "kept": 3}
    usual |= {"survivors": 3, "imports": 0, "identical": True, **changes}
    return Restart("plain", "trainer", seconds, **usual)


def test_restarts_are_shown_by_fault_and_each_promise_has_a_limit() -> None:
    cold = restart(2.5, starts={"cold": 4}, kept=0, imports=4)
    found = [restart(0.5), restart(0.75), cold, Restart("torchrun", "trainer", 9.0)]
    text = restart_table.table(found, {"zero1": "not installed"})
    start = "| plain PyTorch | trainer killed | 3 | 0.75 s | 2.50 s | 0.01 | 0.02 | 0.10 | 0.10 | "
    assert f"{start}0.90 | 0.20 | 6 of 9 | 6 in process, 2 warm, 4 cold | 4 | yes |" in text
    assert "| torchrun | trainer killed | 1 | 9.00 s | 9.00 s |" in text
    assert "| zero1 |  | 0 | not installed |" in text
    assert [row.met for row in restart_table.limits(found)] == [True, True, False, False, True]


def test_a_restart_that_never_was_or_differs_is_missed() -> None:
    found = [restart(None, parts={}, identical=False)]
    assert "| never | never |" in restart_table.table(
        found, {}
    ) and "**1 not**" in restart_table.table(found, {})
    assert [row.met for row in restart_table.limits(found)] == [None, False, True, True, False]


@pytest.mark.all_layouts
@pytest.mark.mpi
def test_restarts_are_measured(tmp_path: Path) -> None:
    """What the figures are is another question, on a machine that tests keep busy."""
    command = [sys.executable, "-m", "benchmarks", "restart", "--only", "plain", "--seeds", "1"]
    command += ["--only", "torchrun", "--json", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert not found["absent"], ended.stderr
    ours = [one for one in found["restarts"] if one["training"] == "plain"]
    assert [one["fault"] for one in ours] == ["trainer", "node", "trainer and encoder"]
    for one in ours:
        assert one["identical"] and one["imports"] == one["starts"].get("cold", 0)
        assert sum(one["starts"].values()) == 4 and one["kept"] <= one["survivors"]
        # The clock of the job and the traces of its ranks are two witnesses.
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"], abs=0.3)
    assert [one["starts"] for one in found["restarts"][3:]] == [{"cold": 4}]


def test_a_framework_that_is_not_installed_is_said_to_be_so(tmp_path: Path) -> None:
    absent = bookkeeping.Program("absent_loop", "save() of none", "absent-core", "absent.training")
    assert not absent.installed
    (row,) = bookkeeping.measured(absent, Jobs(7, "cpu", tmp_path, 60.0))
    assert (row.samples, row.met) == ((), None)
    assert row.note == "not measured: no absent-core is installed"


def test_calls_that_capture_nothing_do_not_count(
    smp: FakeSmp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotManager, "save", SnapshotManager.save)  # wrapped for this test only
    calls, state = SaveCalls(captures=2), {"weight": torch.ones(8), "bias": torch.ones(2)}
    manager = make_manager(smp)
    for captured in range(WARM_UP + 2):
        assert not calls.enough and len(calls.seconds) == captured
        assert manager.save(2 * captured, state).skipped
        assert not capture(smp, manager, state, 2 * captured + 1, captured % 2).skipped
    assert calls.enough
    manager.close()
    calls.write(tmp_path / "out.json", "a test")
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "note": "2 tensors; a test",
        "seconds": calls.seconds[WARM_UP:],
    }
