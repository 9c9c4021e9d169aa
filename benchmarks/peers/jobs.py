"""One job of one way of saving, from an empty folder to what it measured."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.catalogue import DLROVER, SUPERVISED, WAYS, Way
from benchmarks.peers.rank import FLUSHES, LOADS, SAVED, Plan, lines
from megatron_ft.core.process_tools import free_port

RANKS = 2
JOB_SECONDS = 240.0
END_SECONDS = 20.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Found:
    """What one job measured, or ``why`` it could not."""

    way: str
    pairs: tuple[dict[str, float], ...] = ()
    singles: tuple[dict[str, float], ...] = ()
    loads: tuple[dict[str, Any], ...] = ()
    flushes: tuple[float, ...] = ()
    """Seconds that survivors took before anybody could load, once for each failure."""
    why: str = ""


def run(way: str, python: Path, **sizes: Any) -> Found:
    """Run the job; what goes wrong with it is found too, never raised."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="megatron-ft-benchmark-") as name:
        folder = Path(name)
        plan = msgspec.json.encode(Plan(way=way, folder=name, **sizes)).decode()
        log = folder / "log"
        try:
            program = [str(python), "-m", "benchmarks.peers.rank", plan]
            _launched(WAYS[way], program, folder, log, sizes["every"])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            said = reason(log.read_text(errors="replace")) if log.exists() else ""
            return Found(way, why=said or str(error))
        return read(way, folder)


def read(way: str, folder: Path) -> Found:
    """What the ranks have written."""
    (saved,) = lines(folder / SAVED)
    return Found(
        way,
        tuple(saved["pairs"]),
        tuple(saved["singles"]),
        tuple(lines(folder / LOADS)),
        tuple(one["seconds"] for one in lines(folder / FLUSHES)),
    )


def reason(log: str) -> str:
    """The exception that a log's first traceback ended with, without the rank's prefix."""
    found = re.findall(r"^(?:\[rank\d+\]: ?)?((?:[\w]+\.)*\w*(?:Error|Exception)\b.*)$", log, re.M)
    return found[0].strip()[:200] if found else ""


def _launched(way: Way, program: list[str], folder: Path, log: Path, every: int) -> None:
    if way.launcher == SUPERVISED:
        _supervised(way.protect, program, folder, log, every)
    elif way.launcher == DLROVER:
        _under_dlrover(program, folder, log)
    else:
        while _killed(program, log):
            pass


def _killed(program: list[str], log: Path) -> bool:
    """One incarnation of all ranks without a launcher; whether they were killed: another one
    follows."""
    common = {**_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    with log.open("a") as to:
        children = [
            subprocess.Popen(
                program,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=to,
                stderr=to,
                start_new_session=True,
            )
            for rank in range(RANKS)
        ]
        codes = _ended(children)
    if codes == [-signal.SIGKILL] * RANKS:
        return True
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    return False


def _ended(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes; processes that a rank has left behind end with it."""
    try:
        return [child.wait(timeout=JOB_SECONDS) for child in children]
    finally:
        for child in children:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask first: a supervisor has started processes that are not of its group."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _supervised(protect: str, program: list[str], folder: Path, log: Path, every: int) -> None:
    command = [sys.executable, "-m", "megatron_ft.cli.main", "run"]
    command += ["--job", f"peers-{uuid.uuid4().hex[:8]}", "--nodes", str(RANKS)]
    command += ["--protect", protect, "--from-scratch", "--quarantine-iterations", "0"]
    command += ["--free-on-exit"]
    command += ["--state-dir", str(folder / "state"), "--arena-dir", str(folder / "arenas")]
    environment = {**_environment(), "MEGATRON_FT_SNAPSHOT_INTERVAL": str(every)}
    _one([*command, "--log-dir", str(folder / "logs"), "--", *program], environment, log)


def _under_dlrover(program: list[str], folder: Path, log: Path) -> None:
    """Its master listens on every interface, so the job gets a network of its own."""
    job = f"peers{uuid.uuid4().hex[:8]}"
    command = [program[0], "-m", "benchmarks.peers.dlrover_job", job, str(RANKS), *program[2:]]
    enter = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    script = 'ip link set lo up && exec "$0" "$@"'
    environment = {**_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        _one([*enter, "sh", "-c", script, *command], environment, log)
    finally:
        for segment in Path("/dev/shm").glob(f"{job}_*"):
            segment.unlink()


def _one(command: list[str], environment: dict[str, str], log: Path) -> None:
    with log.open("w") as to:
        child = subprocess.Popen(
            command, env=environment, stdout=to, stderr=to, start_new_session=True
        )
        (code,) = _ended([child])
    if code:
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {code}")


def _environment() -> dict[str, str]:
    """A peer's environment has packages of its own, so only our own root is added."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
