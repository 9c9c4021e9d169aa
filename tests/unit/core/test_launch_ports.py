"""Ports for rendezvous stay free until they are opened."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_ft.core import process_tools as ports


def test_a_port_that_is_taken_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the kernel chooses, as where its own range cannot be read."""
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(ports, "TRIES", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "BELOW", range(number, number + 1))
        ports.EPHEMERAL.write_text("65000 65535")
        assert ports.free_port() != number
    ports.EPHEMERAL.write_text("no numbers")
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.free_port()))
