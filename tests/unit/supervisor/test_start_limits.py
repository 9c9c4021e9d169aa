"""The start of a job where the machine lacks something: room for notes, descriptors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.smp_node import SmpNode

TIMEOUT = 60.0


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "full"
    mounted.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(mounted)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("cannot mount a tmpfs: needs root and the right to mount")
    try:
        (mounted / "fill").write_bytes(bytes(64 << 10))
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def test_an_smp_on_a_full_tmpfs_names_the_folder_and_what_it_needs(full_tmpfs: Path) -> None:
    node = SmpNode(full_tmpfs)
    node.log = full_tmpfs.with_name("log")
    node.start()
    assert node.process is not None and node.process.wait(TIMEOUT) == 1
    said = node.log.read_text()
    assert f"{full_tmpfs}" in said and "Traceback" not in said
    assert "is full" in said and "needs 64.00 KiB" in said and "0 bytes of 64.00 KiB" in said


def test_a_soft_limit_of_descriptors_is_raised_for_all_children() -> None:
    program = "from megatron_ft.supervisor.spec import raise_open_files; import os; "
    program += "raise_open_files(); os.system('ulimit -Sn')"
    script = 'ulimit -Sn 40; ulimit -Hn 69; exec "$0" -c "$1"'
    said = subprocess.check_output(["sh", "-c", script, sys.executable, program], timeout=TIMEOUT)
    assert said == b"69\n"
