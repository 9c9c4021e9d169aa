"""The SMP's look at a trainer that says that it has let go of its arenas."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.smp.store import SUFFIX
from megatron_ft.smp.survivors import holds_arena

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
