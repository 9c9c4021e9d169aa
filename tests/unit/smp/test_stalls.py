"""Readers that do not get on lose their slot; those that are slow keep it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.rpc import messages as m
from megatron_ft.smp.processes import STALL_SECONDS, Stalls, switches
from tests.support.smp_node import service

SLOW = "import time\nprint('runs', flush=True)\nwhile True: time.sleep(0.01)"


def test_a_reader_is_named_once_when_it_has_not_run_for_long() -> None:
    counts = {1: 5, 2: 5}
    stalls = Stalls(100.0, counts.__getitem__)
    both = {"slow": 1, "hung": 2}
    assert stalls.poll(both, 0.0) == []
    counts[1] += 1
    assert stalls.poll(both, 99.0) == []
    assert stalls.poll(both, 100.0) == ["hung"]
    assert stalls.poll(both, 150.0) == []
    counts[2] += 1
    assert stalls.poll(both, 198.0) == []
    assert stalls.poll(both, 199.0) == ["slow"]


def test_a_process_that_sleeps_between_pieces_runs_and_a_stopped_one_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            before = switches(process.pid)
            while switches(process.pid) == before:
                assert process.poll() is None
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert switches(process.pid) == switches(process.pid) > 0
        finally:
            process.kill()
    assert switches(process.pid) == -1


def test_a_stalled_reader_holds_nothing_and_is_told_of(tmp_path: Path) -> None:
    async def story() -> tuple[list[str], list[object]]:
        environment = ProcessEnvironment("job", "n0", tmp_path, 1)
        host = service(environment)
        told: list[object] = []

        async def tell(body: object) -> None:
            told.append(body)

        host.events.emit = tell  # type: ignore[method-assign]
        host.stalls = Stalls(0.0, lambda pid: 7)
        host.readers.watch("r", os.getpid())
        gone: list[str] = []
        host.machine.reader_gone = gone.append  # type: ignore[method-assign]
        await host.drop_stalled()
        await host.drop_stalled()
        assert host.readers.pids == {}
        return gone, told

    gone, told = asyncio.run(story())
    assert gone == ["r"] and told == [m.ReaderStalled("r", STALL_SECONDS)]
