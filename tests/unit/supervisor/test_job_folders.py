"""Which folders of jobs count as left behind where others work on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.job_folders import unused
from tests.support.jobs import ROOT

SUPERVISOR = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from megatron_ft.supervisor.job_state import JobState
with JobState(Path(sys.argv[1]), "led"):
    print("leads", flush=True)
    sys.stdin.read()
"""


def test_what_another_run_leads_is_none_of_ours(tmp_path: Path) -> None:
    """Its nodes have just been killed, and the next incarnation waits for its turn."""
    root = tmp_path / "root"
    left, led = root / "left", root / "led"
    for folder in (root, left, led):
        folder.mkdir(mode=0o700)
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "state" / "led"), str(ROOT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"leads\n"
        assert unused(root, {os.getpid()}) == {left}
        assert unused(root, {os.getpid(), other.pid}) == {left, led}, "one of our own is left"
        other.stdin.close()
        assert other.wait(30) == 0
    assert unused(root, {os.getpid()}) == {left, led}
