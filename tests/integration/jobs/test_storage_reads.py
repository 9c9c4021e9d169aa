"""A job that continues with fewer nodes reads no state from storage: all reads are traced."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ft.core.process_tools import free_port
from megatron_ft.launchers.virtual import VirtualCluster
from tests.integration.jobs.test_reshape_jobs import check
from tests.programs import elastic_training

SHARED_MEMORY = Path("/dev/shm")
ELEMENTS, ITERATIONS = 1_000_003, 200
STATE_BYTES = 8 * ELEMENTS
"""Of the vector and its momentum."""

MOST_BYTES = STATE_BYTES // 100
"""A job reads its own notes."""

WAIT = 200.0
CALLS = (
    *("read", "readv", "pread64", "preadv", "preadv2", "mmap", "sendfile", "copy_file_range"),
    *("splice", "io_uring_setup"),
)
READ = re.compile(r"(?:p?readv?2?|pread64|copy_file_range|splice)\(\d+<(/[^>]*)>.* = (\d+)$")
SENT = re.compile(r"sendfile\([^,]*, \d+<(/[^>]*)>.* = (\d+)$")
MAPPED = re.compile(r"mmap\(\w+, (\d+),.* \d+<(/[^>]*)>, \w+\) = 0x")


def can_trace() -> bool:
    command = ["strace", "-f", "-o", os.devnull, "true"]
    return shutil.which("strace") is not None and not subprocess.call(command)


pytestmark = [
    pytest.mark.all_layouts,
    pytest.mark.slow,
    pytest.mark.skipif(not can_trace(), reason="needs strace, and the right to trace"),
]


def bytes_read(traces: Path, since: float, memory: Path) -> Counter[str]:
    """Bytes read or mapped of each file that has changed since then and is not in ``memory``.

    An older file holds no state of the job.  A file that is gone is one that the job has made.
    """
    found: Counter[str] = Counter()
    for trace in traces.iterdir():
        for line in trace.read_text(errors="replace").splitlines():
            assert not line.startswith("io_uring_setup("), "its reads are not traced"
            if matched := READ.match(line) or SENT.match(line):
                found[matched[1]] += int(matched[2])
            elif matched := MAPPED.match(line):
                found[matched[2]] += int(matched[1])
    kernel = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", f"{memory}/")
    return Counter(
        {
            path: size
            for path, size in found.items()
            if not path.startswith(kernel)
            and (not os.path.exists(path) or os.stat(path).st_mtime >= since)
        }
    )


class TracedJob:
    """A job of four nodes as a user starts it, under strace; ``memory`` is where arenas are."""

    def __init__(self, folder: Path, memory: Path, flags: Sequence[str]) -> None:
        self.folder, self.memory = folder, memory
        self.name = f"traced-{free_port()}"
        self.cluster = VirtualCluster(self.name, [f"node{n}" for n in range(4)], memory)
        self.log, self.traces = folder / "log", folder / "traces"
        self.traces.mkdir()
        places = ["--state-dir", str(folder / "state"), "--arena-dir", str(memory)]
        # Of MPI's own files in shared memory nobody could say what is in them.
        places += ["--transport", "tcp", "--warm-start", "off", "--job", self.name]
        program = [sys.executable, elastic_training.__file__, "--folder", str(folder)]
        program += ["--elements", str(ELEMENTS), "--iterations", str(ITERATIONS)]
        traced = ["strace", "-ff", "-y", "-s", "0", "-e", "signal=none"]
        traced += ["-e", f"trace={','.join(CALLS)}", "-o", str(self.traces / "trace"), "--"]
        run = [sys.executable, "-m", "megatron_ft.cli.main", "run", *places, *flags]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as to:
            self.process = subprocess.Popen(
                [*traced, *run, "--on-no-spare", "shrink", "--", *program],
                env=environment,
                stdout=to,
                stderr=to,
                start_new_session=True,
            )

    def await_word(self, word: str) -> None:
        self._until(lambda: word in self.log.read_text(), f"{word!r} in the job's log")

    def finish(self) -> None:
        """Let it come to its end."""
        (self.folder / "gate").touch()
        self._until(lambda: self.process.poll() is not None, "the job's end")
        assert self.process.returncode == 0, self.log.read_text()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {self.log.read_text()}"
            time.sleep(0.05)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT)
        self.cluster.destroy()


@contextmanager
def traced_job(folder: Path, *flags: str) -> Iterator[TracedJob]:
    # Longer paths would not fit into the address of a socket.
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="megatron-ft-traced-") as memory:
        job = TracedJob(folder, Path(memory), flags)
        try:
            yield job
        finally:
            job.end()


def test_no_state_is_read_from_storage(tmp_path: Path) -> None:
    """One of four nodes is lost, its shard is rebuilt, and all are reshaped to three."""
    began = time.time()
    with traced_job(tmp_path, "--nodes", "4", "--protect", "rs:3+1") as job:
        job.await_word("committed (protected)")
        job.cluster.kill_node("node0")
        job.await_word("4 shards reshaped to 3")
        job.finish()
        read = bytes_read(job.traces, began, job.memory)
    check(tmp_path, 3, ITERATIONS, ELEMENTS)
    assert read.total() < MOST_BYTES, read.most_common(10)


def test_a_drained_checkpoint_is_seen_to_be_read(tmp_path: Path) -> None:
    """The tracing would notice, if memory could not serve."""
    began = time.time()
    drains = tmp_path / "drains"
    flags = ("--drain-dir", str(drains), "--drain-interval", "4")
    with traced_job(tmp_path, "--nodes", "2", "--protect", "none", *flags) as job:
        job.await_word("drained")
        job.cluster.kill_node("node1")
        job.await_word("2 shards reshaped to 1")
        job.finish()
        read = bytes_read(job.traces, began, job.memory)
    check(tmp_path, 1, ITERATIONS, ELEMENTS)
    drained = sum(size for path, size in read.items() if path.startswith(f"{drains}/"))
    assert drained >= STATE_BYTES, read.most_common(10)
