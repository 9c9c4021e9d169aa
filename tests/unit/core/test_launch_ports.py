"""Ports for rendezvous stay free until they are opened."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import process_tools as ports


@given(st.integers(1, 65535), st.integers(1, 65535))
def test_the_kernel_gives_none_of_them_away_by_itself(one: int, other: int) -> None:
    low, high = sorted((one, other))
    found = ports.unclaimed(f"{low}\t{high}\n")
    assert not any(low <= port <= high for port in (*found[:1], *found[-1:]))
    assert not found or (len(found) >= ports.ENOUGH and 1024 < found[0] and found[-1] < 65536)


@pytest.mark.parametrize(
    ("ephemeral", "first"), [("32768 60999", 15000), ("1024 60999", 61000), ("1024 65535", None)]
)
def test_ports_of_usual_machines(ephemeral: str, first: int | None) -> None:
    assert next(iter(ports.unclaimed(ephemeral)), None) == first


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
        monkeypatch.setattr(ports, "ENOUGH", 1)
        ports.EPHEMERAL.write_text("65000 65535")
        assert ports.free_port() != number
    ports.EPHEMERAL.write_text("no numbers")
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.free_port()))
