"""The server that forks processes for jobs of tests: it serves on whatever a client does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython


@pytest.fixture
def server() -> Iterator[WarmPython]:
    warm = WarmPython(["json"])
    yield warm
    warm.close()


@pytest.mark.parametrize("words", [b"", b'{"argv": [', b'{"wait": 1}', b"[]"])
def test_a_client_that_dies_while_it_asks_ends_nobody_elses(
    server: WarmPython, tmp_path: Path, words: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server.path)
        client.sendall(words)
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(7)")
    assert server.start([str(script)], os.environ, tmp_path / "log").wait() == 7
