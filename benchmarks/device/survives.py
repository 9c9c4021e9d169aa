"""Training that is killed and resumes, on a GPU, compared with a run that nothing interrupts.

    python -m benchmarks.device.survives --arenas FOLDER [--rehearse] [--only CASE]...
                                         [--markdown FILE]

Each case is a job of `megatron-ft run` on virtual nodes that share the GPU.  Faults strike once
the incarnation has two more commits, protected by parity where there is any.  All losses, weights,
optimizer states and random states of all ranks are compared bit by bit.  ``--rehearse`` does the
same on the CPU, with a small model.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch

from benchmarks.jobs import LOG, NODES, alone, supervised
from megatron_ft.cli.chaos.trace import VARIABLE, final_path, read_trace
from megatron_ft.cli.demo import demo_model, stdlib_corpus
from megatron_ft.cli.demo.final_state import Comparison, compare_runs
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.supervisor.event_log import EVENTS, LoggedEvent, read_events
from megatron_ft.supervisor.events import CommittedEvent

LIMIT_SECONDS = 70.0
"""Longest time of one run, of a job after its last fault."""

STRIKE_SECONDS = 40.0
"""Longest time until there are commits to rely on."""

COMMITS = 2
CORPUS_BYTES = 1 << 20
BESIDE = 6
"""Cases that run at once: this measures no times."""

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Needed for bit-identical repetitions, with or without us."""

TRAINER, NODE = "trainer", "node"


@dataclass(frozen=True)
class Shape:
    """Sizes of the trainings: iterations long enough for faults, models large enough to matter."""

    iterations: int
    pace: float
    width: int
    hidden: int
    layers: int
    sequence: int


GPU = Shape(iterations=400, pace=0.03, width=2048, hidden=512, layers=2, sequence=128)
CPU = Shape(iterations=300, pace=0.05, width=128, hidden=64, layers=2, sequence=64)


@dataclass(frozen=True)
class Case:
    """One job and the faults that hit it, one after the other."""

    name: str
    program: Callable[[Shape, Path, Path], list[str]]
    ranks: int
    faults: tuple[str, ...]
    restart: str = "new-process"

    @property
    def spares(self) -> int:
        """Nodes that take the places of lost ones."""
        return self.faults.count(NODE)


@dataclass(frozen=True)
class Outcome:
    """One case's end: what was compared, what the job reported, or why there is nothing."""

    case: Case
    compared: Comparison | None = None
    restored: tuple[str, ...] = ()
    processes: int = 0
    device: str = ""
    reason: str = ""


def plain(backend: str) -> Callable[[Shape, Path, Path], list[str]]:
    """examples/plain_pytorch.py with a trace."""

    def program(shape: Shape, corpus: Path, trace: Path) -> list[str]:
        flags = ["--iterations", str(shape.iterations), "--width", str(shape.width)]
        flags += ["--iteration-seconds", str(shape.pace), "--losses", os.devnull]
        if torch.cuda.is_available():
            flags += ["--backend", backend]
        return [sys.executable, "-m", "benchmarks.frameworks.traced_plain", *flags]

    return program


def megatron(*more: str, sharded: bool = False) -> Callable[[Shape, Path, Path], list[str]]:
    """Megatron's own loop with its local transformer, a distributed optimizer if ``sharded``.

    Over gloo it cannot be sharded on a device: rank 0 of core 0.19.2 ended with SIGSEGV in its
    first step, without us.
    """

    def program(shape: Shape, corpus: Path, trace: Path) -> list[str]:
        flags = demo_model.demo_arguments(
            iterations=shape.iterations,
            data_path=corpus,
            layers=shape.layers,
            hidden=shape.hidden,
            sequence=shape.sequence,
            distributed_optimizer=sharded,
            cache_path=corpus.parent / "indices",
        )
        if torch.cuda.is_available():
            # With it Megatron leaves the weights in host memory.
            flags.remove("--use-cpu-initialization")
            flags += ["--deterministic-mode", *more]
        module = "megatron_ft.cli.demo.pretrain_gpt"
        return [sys.executable, "-m", module, *flags, "--trace-dir", str(trace)]

    return program


CASES = (
    Case("plain, 1 rank, NCCL", plain("nccl"), 1, (TRAINER,)),
    Case("plain, 2 ranks, gloo", plain("gloo"), 2, (TRAINER, NODE)),
    Case("plain, 2 ranks, gloo, in process", plain("gloo"), 2, (TRAINER,), "in-process"),
    Case(
        "Megatron, 1 rank, NCCL",
        megatron("--distributed-backend", "nccl", sharded=True),
        1,
        (TRAINER,),
    ),
    Case("Megatron, 2 ranks, gloo", megatron(), 2, (TRAINER, NODE)),
    Case("Megatron, 2 ranks, gloo, in process", megatron(), 2, (TRAINER,), "in-process"),
)


class Strikes:
    """Waits for a job of ``ranks`` ranks, with all that it keeps in ``folder``, to be protected."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self._level = "protected" if ranks > 1 else "local"
        self._folder, self.since = folder, 0.0

    def events(self) -> Sequence[LoggedEvent]:
        """All that the job has recorded."""
        paths = list(self._folder.glob(f"state/**/{EVENTS}"))
        return read_events(paths[0]).events if paths else ()

    def await_commits(self, fault: str) -> None:
        """Wait until the job has committed twice ``since``; RuntimeError if it does not."""
        deadline = time.monotonic() + STRIKE_SECONDS
        while time.monotonic() < deadline:
            events = [event for event in self.events() if event.at > self.since]
            if any(event.kind == "finished" for event in events):
                raise RuntimeError(f"training ended before the {fault}")
            commits = [e.facts for e in events if isinstance(e.facts, CommittedEvent)]
            if sum(facts.level == self._level for facts in commits) >= COMMITS:
                return
            time.sleep(0.02)
        log = (self._folder / LOG).read_text()[-1500:]
        raise RuntimeError(f"no {COMMITS} commits in {STRIKE_SECONDS:.0f} s: {log}")


def strike(case: Case, strikes: Strikes, trace: Path, cluster: VirtualCluster) -> None:
    """All faults of the case, each once the job has recovered from the one before."""
    for fault in case.faults:
        strikes.await_commits(f"loss of a {fault}")
        strikes.since = time.monotonic()
        if fault == NODE:
            cluster.kill_node(NODES[0])
        else:
            os.kill(read_trace(trace, case.ranks - 1)[-1].pid, signal.SIGKILL)


def run_case(case: Case, shape: Shape, corpus: Path, arenas: Path) -> Outcome:
    """Both runs of a case, and their comparison."""
    with tempfile.TemporaryDirectory(dir=arenas, prefix="megatron-ft-survives-") as path:
        folder = Path(path)
        ours, oracle = folder / "run", folder / "uninterrupted"
        strikes = Strikes(case.ranks, folder)
        try:
            _run_both(case, shape, corpus, folder, strikes)
        except (RuntimeError, TimeoutError, OSError, ValueError) as error:
            return Outcome(case, reason=_tail(str(error), folder))
        events = strikes.events()
        pids = {line.pid for line in read_trace(ours, 0)}
        return Outcome(
            case,
            compare_runs(ours, oracle, case.ranks, shape.iterations),
            tuple(event.text for event in events if event.kind == "restoring"),
            len(pids),
            torch.load(final_path(ours, 0), weights_only=True)["device"],
        )


def _run_both(case: Case, shape: Shape, corpus: Path, folder: Path, strikes: Strikes) -> None:
    ours, oracle = folder / "run", folder / "uninterrupted"
    (folder / "logs").mkdir()
    common = {**demo_model.ENVIRONMENT, **DETERMINISTIC}
    alone(
        case.program(shape, corpus, oracle),
        case.ranks,
        LIMIT_SECONDS,
        {**common, VARIABLE: str(oracle)},
        folder / "logs" / "uninterrupted.log",
    )
    program = case.program(shape, corpus, ours)
    if "pretrain_gpt" in " ".join(program):
        program.append("--inmem-snapshot")
    supervised(
        program,
        case.ranks,
        folder,
        LIMIT_SECONDS,
        2,
        spares=case.spares,
        more_flags=["--restart", case.restart, "--log-dir", str(folder / "logs")],
        variables={**common, VARIABLE: str(ours)},
        meanwhile=partial(strike, case, strikes, ours),
    )


def _tail(said: str, folder: Path) -> str:
    """The error, with the last lines of each rank's log."""
    logs = sorted(folder.glob("logs/**/*.log"))
    return "\n".join([said, *(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)])


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each case, in Markdown."""
    lines = [
        "| case | faults | losses, tensors, MiB | identical | device | processes of rank 0 |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for one in outcomes:
        name, faults = one.case.name, ", ".join(one.case.faults)
        if (found := one.compared) is None:
            first = one.reason.strip().splitlines()[0][:160]
            lines.append(f"| {name} | {faults} | none: {first} | | | |")
            continue
        counts = f"{found.losses}, {found.tensors}, {found.bytes / (1 << 20):.1f}"
        same = "yes" if found.identical else f"**no**: {found.differences[0]}"
        lines.append(f"| {name} | {faults} | {counts} | {same} | {one.device} | {one.processes} |")
    return "\n".join(lines)


def report(one: Outcome) -> None:
    """Print what came of a case as soon as it is known."""
    print(f"\n== {one.case.name}", *one.restored, one.reason, sep="\n")
    for difference in one.compared.differences[:8] if one.compared else ():
        print("DIFFERENT:", difference)
    sys.stdout.flush()


def place() -> str:
    """The card and the versions."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (a rehearsal)"
    return f"{date.today()}, {card}, torch {torch.__version__}, {os.cpu_count()} cores"


def main() -> int:
    """Run the cases; 1 if one is not identical, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arenas", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.rehearse):
        print(f"survives: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        return 2
    shape = CPU if options.rehearse else GPU
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    beside = 1 if options.rehearse else BESIDE
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(beside) as pool:
        corpus = stdlib_corpus.prepare(Path(folder), CORPUS_BYTES)
        running = [pool.submit(run_case, case, shape, corpus, options.arenas) for case in chosen]
        for one in as_completed(running):
            report(one.result())
    outcomes = [one.result() for one in running]
    text = f"{place()}\n\n{table(outcomes)}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    good = all(one.compared is not None and one.compared.identical for one in outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
