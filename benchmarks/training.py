"""What saving costs a training: whole jobs, with us and with what torch itself brings."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.program import Plan
from benchmarks.table import Row
from megatron_ft.launch.ports import free_port
from megatron_ft.launch.virtual import VirtualCluster

END_SECONDS = 60.0
SPARE_CORES = 4
"""With so many cores two ranks leave some for copies and parity, and the shadow has a limit."""

NAMES = {"inmem": "megatron-ft, xor:2", "dcp": "DCP async_save", "torch.save": "torch.save"}


@dataclass(frozen=True)
class Jobs:
    """How jobs are run: ``rounds`` of each, on ``device``, with all that they keep in a folder
    below ``arenas``; one that takes longer than ``limit_seconds`` has failed."""

    rounds: int
    device: str
    arenas: Path
    limit_seconds: float


def parts(mib: int, jobs: Jobs) -> Iterator[Iterator[Row]]:
    """Stall, bookkeeping, shadow, blocked, safe: one job each."""
    yield _one_rank(mib, jobs)
    yield _short(mib, jobs)
    yield _bookkeeping(jobs)
    for method, name in NAMES.items():
        yield _beside(method, name, mib, jobs)


def _one_rank(mib: int, jobs: Jobs) -> Iterator[Row]:
    """Where forward and backward hide the copy: held time of an iteration, and the shadow.

    A rank of one thread leaves all other cores to copies and digests.
    """
    found = _run(1, jobs, method="inmem", tensors=16, mib=mib, work=4)
    shares = [_held(one) / one["total"] for one in _saving(found)]
    name = "stall, forward+backward of 4 copies"
    yield Row(name, tuple(100 * share for share in shares), "% of an iteration", 1.0, False)
    yield _shadow("shadow with a core to spare: one rank, 4 copies", found, 2)


def _short(mib: int, jobs: Jobs) -> Iterator[Row]:
    """Held time beyond what a copy takes longer than forward and backward, in copies."""
    found = _run(1, jobs, method="inmem", tensors=16, mib=mib, work=0.5, copies=True)
    excess = [
        (_held(one) - max(0.0, one["copy"] - one["work"])) / one["copy"] for one in _saving(found)
    ]
    name = "stall beyond copy - (forward+backward of 0.5 copies)"
    yield Row(name, tuple(100 * part for part in excess), "% of a copy", 2.0, False)


def _bookkeeping(jobs: Jobs) -> Iterator[Row]:
    """What save() does besides copying, with a cached layout of 2,000 tensors."""
    found = _run(1, jobs, method="inmem", tensors=2000, mib=32, work=10)
    calls = tuple(1000 * one["save"] for one in _saving(found))
    yield Row("save() with 2,000 tensors of 16 KiB", calls, "ms", 1.0, False)


def _beside(method: str, name: str, mib: int, jobs: Jobs) -> Iterator[Row]:
    """Two ranks, each on a node of its own: the shadow, then single saves."""
    found = _run(2, jobs, method=method, tensors=16, mib=mib, work=8, singles=True)
    ours = method == "inmem"
    yield _shadow(f"shadow: {name}", found, SPARE_CORES if ours else None)
    for figure, bound in (("blocked", 1.05), ("safe", 4.1)):
        samples = tuple(one[figure] / one["copy"] for one in found["singles"])
        yield Row(f"{figure}: {name}", samples, "x copy", bound if ours else None, False)


def _shadow(name: str, found: dict[str, Any], cores: int | None) -> Row:
    """Speed of phases with saves against those without; a limit where there are enough cores."""
    phases = found["phases"]
    pairs = list(zip(phases[::2], phases[1::2], strict=True))
    speed = tuple(_mean(off, "total") / _mean(on, "total") for off, on in pairs)
    saved = statistics.mean(one["saved"] for _, on in pairs for one in on)
    limit = 0.98 if cores is not None and (os.cpu_count() or 1) >= cores else None
    note = f"saves in {saved:.0%} of iterations"
    return Row(name, speed, "x speed without saves", limit, note=note)


def _saving(found: dict[str, Any]) -> list[dict[str, float]]:
    """Iterations that saved, each with the fence that followed in the next one."""
    joined = []
    for phase in found["phases"][1::2]:
        for one, following in zip(phase, phase[1:], strict=False):
            if one["saved"]:
                joined.append({**one, "fence": following["fence"], "work": following["work"]})
    if not joined:
        raise RuntimeError("no snapshot was taken in the measured iterations")
    return joined


def _held(one: dict[str, float]) -> float:
    return one["save"] + one["fence"]


def _mean(phase: list[dict[str, float]], figure: str) -> float:
    return statistics.mean(one[figure] for one in phase)


def _run(ranks: int, jobs: Jobs, *, method: str, **plan: Any) -> dict[str, Any]:
    """One job to its end; what its rank 0 measured."""
    with tempfile.TemporaryDirectory(dir=jobs.arenas, prefix="megatron-ft-benchmark-") as folder:
        out = Path(folder) / "measured.json"
        text = msgspec.json.encode(
            Plan(
                method=method,
                rounds=jobs.rounds,
                phase=8,
                out=str(out),
                folder=folder,
                device=jobs.device,
                **plan,
            )
        ).decode()
        program = [sys.executable, "-m", "benchmarks.program", text]
        if method == "inmem":
            _supervised(program, ranks, Path(folder), jobs.limit_seconds)
        else:
            _alone(program, ranks, jobs.limit_seconds)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _supervised(program: list[str], ranks: int, folder: Path, limit_seconds: float) -> None:
    protect = "xor:2" if ranks > 1 else "none"
    job = f"benchmark-{uuid.uuid4().hex[:8]}"
    flags = ["--job", job, "--nodes", str(ranks), "--protect", protect]
    flags += ["--state-dir", str(folder / "state"), "--arena-dir", str(folder / "arenas")]
    flags += ["--from-scratch"]
    command = [sys.executable, "-m", "megatron_ft.cli.main", "run", *flags, "--", *program]
    environment = {**_environment(), "MEGATRON_FT_SNAPSHOT_INTERVAL": "1"}
    log = folder / "supervisor.log"
    try:
        with log.open("w") as to:
            supervisor = subprocess.Popen(command, env=environment, stdout=to, stderr=to)
            (code,) = _ended([supervisor], limit_seconds)
    except TimeoutError as error:
        raise RuntimeError(f"{error}: {log.read_text()[-3000:]}") from error
    finally:
        # A job that is not finished keeps its memory, for a next life that nobody will start.
        VirtualCluster(job, ["node0"], folder / "arenas").destroy()
    if code:
        raise RuntimeError(f"the job failed ({code}): {log.read_text()[-3000:]}")


def _alone(program: list[str], ranks: int, limit_seconds: float) -> None:
    common = {**_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        children.append(subprocess.Popen(program, env=common | place))
    codes = _ended(children, limit_seconds)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def _ended(children: Sequence[subprocess.Popen[bytes]], limit_seconds: float) -> list[int]:
    """Exit codes; TimeoutError if one has not ended by itself.

    None outlives this call, and a supervisor has time to end its own processes.
    """
    try:
        return [child.wait(timeout=limit_seconds) for child in children]
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no end within {limit_seconds:g} s") from None
    finally:
        for child in children:
            child.terminate()
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=END_SECONDS)
            child.kill()
            child.wait()
