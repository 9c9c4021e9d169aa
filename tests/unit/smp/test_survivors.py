"""An SMP's proof that a trainer has let go of its arenas."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.rpc import messages as m
from megatron_ft.smp.processes import Writers
from megatron_ft.smp.store import SUFFIX
from megatron_ft.smp.survivors import Survivors, holds_arena

HOLD = {
    "nothing": "",
    "a mapping": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); os.closerange(3, 64)",
    "a file": "f = os.open(path, os.O_RDWR)",
    "a mapping of a removed file": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); "
    "os.closerange(3, 64); os.unlink(path)",
    "a mapping that it has ended": "m = mmap.mmap(os.open(path, os.O_RDWR), 0); "
    "os.closerange(3, 64); m.close()",
}


@pytest.mark.parametrize("what", HOLD)
def test_a_process_with_an_arena_is_seen(tmp_path: Path, what: str) -> None:
    path = tmp_path / f"dp0{SUFFIX}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    script = (
        f"import mmap, os, sys; path = sys.argv[1]; {HOLD[what]}\nprint(1, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"1\n"
        held = what not in ("nothing", "a mapping that it has ended")
        assert holds_arena(child.pid, tmp_path) is held
        assert not holds_arena(child.pid, tmp_path / "another")
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        # A dead process that was not reaped yet shows no mappings, and cannot be kept.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert holds_arena(child.pid, tmp_path)
        child.wait()
    assert holds_arena(child.pid, tmp_path)


def test_a_trainer_that_dies_while_it_is_asked_is_not_kept(tmp_path: Path) -> None:
    async def die_when_asked() -> dict[int, int]:
        async def send(_identity: object, _message: object) -> None:
            child.kill()
            await asyncio.wait_for(gone.wait(), 10)

        writers = Writers(tmp_path, lambda _: None)
        survivors = Survivors(writers, tmp_path, send)
        survivors.enter(m.Restartable(child.pid, 3), b"restart-3")
        (writer,) = writers.all()
        gone = writers.gone(writer)
        return await asyncio.wait_for(survivors.let_go(2, [3]), 10)

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        assert asyncio.run(die_when_asked()) == {}
    finally:
        child.kill()
        child.stdin.close()
        child.wait()


def test_a_trainer_that_cannot_train_again_is_replaced_with_its_reason(tmp_path: Path) -> None:
    async def ask() -> tuple[dict[int, int], dict[int, str]]:
        async def send(_identity: object, _message: object) -> None:
            survivors.released(m.Released(3, 2, "nice was changed"))

        survivors = Survivors(Writers(tmp_path, lambda _: None), tmp_path, send)
        survivors.enter(m.Restartable(child.pid, 3), b"restart-3")
        return await asyncio.wait_for(survivors.let_go(2, [3]), 10), survivors.renewed

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        kept, renewed = asyncio.run(ask())
        assert kept == {} and "nice was changed" in renewed[3]
    finally:
        child.kill()
        child.stdin.close()
        child.wait()
