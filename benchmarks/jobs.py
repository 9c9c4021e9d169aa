"""Jobs of measured programs: under our supervisor, or ranks without one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core.process_tools import free_port
from megatron_ft.launchers.virtual import VirtualCluster

END_SECONDS = 60.0
LOG = "supervisor.log"
NOTHING: Mapping[str, str] = {}
NODES = [f"node{number}" for number in range(8)]
"""Names of the virtual nodes of `megatron-ft run`."""


@dataclass(frozen=True)
class Jobs:
    """How jobs are run: ``rounds`` of each, on ``device``, with all that they keep in a folder
    below ``arenas``; one that takes longer than ``limit_seconds`` has failed."""

    rounds: int
    device: str
    arenas: Path
    limit_seconds: float

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder for one job, gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.arenas, prefix="megatron-ft-benchmark-") as path:
            yield Path(path)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def supervised(
    program: list[str],
    ranks: int,
    folder: Path,
    limit_seconds: float,
    interval: int = 1,
    *,
    spares: int = 0,
    more_flags: Sequence[str] = (),
    variables: Mapping[str, str] = NOTHING,
    meanwhile: Callable[[VirtualCluster], object] = bool,
) -> None:
    """Run a program in ``ranks`` ranks, each on a node of its own, with all that is kept in
    ``folder``, and snapshots every ``interval`` iterations; RuntimeError with the end of the log
    unless it ends well in time.  ``meanwhile`` is called while it runs.  ``variables`` are added
    to the environment."""
    protect = "xor:2" if ranks > 1 else "none"
    job = f"benchmark-{uuid.uuid4().hex[:8]}"
    flags = ["--job", job, "--nodes", str(ranks), "--spares", str(spares), "--protect", protect]
    flags += ["--state-dir", str(folder / "state"), "--arena-dir", str(folder / "arenas")]
    flags += ["--from-scratch", "--free-on-exit", *more_flags]
    command = [sys.executable, "-m", "megatron_ft.cli.main", "run", *flags, "--", *program]
    ours = {"MEGATRON_FT_SNAPSHOT_INTERVAL": str(interval), **variables}
    environment = {**_environment(), **ours}
    nodes = NODES[: ranks + spares]
    log, cluster = folder / LOG, VirtualCluster(job, nodes, folder / "arenas")
    try:
        with log.open("w") as to:
            supervisor = subprocess.Popen(command, env=environment, stdout=to, stderr=to)
            (code,) = _ended([supervisor], limit_seconds, lambda: meanwhile(cluster))
    except TimeoutError as error:
        raise RuntimeError(f"{error}: {log.read_text()[-3000:]}") from error
    finally:
        # A job that is not finished keeps its memory, for a next incarnation that nobody will
        # start.
        cluster.destroy()
    if code:
        raise RuntimeError(f"the job failed ({code}): {log.read_text()[-3000:]}")


def alone(
    program: list[str],
    ranks: int,
    limit_seconds: float,
    variables: Mapping[str, str] = NOTHING,
    log: Path | None = None,
) -> None:
    """Run a program in ``ranks`` ranks that nobody watches, each as on a node of its own.

    RuntimeError unless all end well, TimeoutError if they do not in time; ``log`` gets their
    output.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    common = {**_environment(), **variables, **place, "WORLD_SIZE": str(ranks)}
    with nullcontext() if log is None else log.open("w") as to:
        children = [
            subprocess.Popen(program, env={**common, "RANK": str(rank)}, stdout=to, stderr=to)
            for rank in range(ranks)
        ]
        codes = _ended(children, limit_seconds)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


def _ended(
    children: Sequence[subprocess.Popen[bytes]],
    limit_seconds: float,
    meanwhile: Callable[[], object] = bool,
) -> list[int]:
    """Exit codes, once all have ended or one has failed; TimeoutError if neither comes in time.

    None outlives this call, and a supervisor has time to end its own processes.
    """
    try:
        meanwhile()
        deadline = time.monotonic() + limit_seconds
        while running := [child for child in children if child.poll() is None]:
            if any(child.returncode for child in children):
                break  # the others may wait for it for ever
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end within {limit_seconds:g} s")
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=0.1)
        return [child.returncode or 0 for child in children]
    finally:
        for child in children:
            child.terminate()
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=END_SECONDS)
            child.kill()
            child.wait()
