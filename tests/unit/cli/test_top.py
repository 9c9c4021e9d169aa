"""``megatron-ft top``: what is on a screen, and the keys, at a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_ft.cli.main import main as cli
from megatron_ft.cli.status import _scrub_line
from megatron_ft.cli.top import View, screen
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.job_state import STATUS
from tests.support.jobs import ROOT

NODES = [f"node{number}" for number in range(64)]
WAIT_SECONDS = 60.0


def job(nodes: list[str]) -> dict[str, Any]:
    """A status as a supervisor writes it."""
    ranks = {
        node: {
            **{"ranks": 8, "iteration": 1000 - 7 * i % 64, "silent": i / 10},
            **{"rank": 8 * i, "phase": "training"},
        }
        for i, node in enumerate(nodes)
    }
    lost = {"iteration": 990, "source": "memory"}
    disk = {"iteration": 900, "source": "disk"}
    summary = {
        **{
            "skipping_for": "",
            "skipped": 0,
            "incarnation": 3,
            "iteration": 1000,
            "encoders": "up",
            "committed": {"iteration": 995},
        },
        **{"crash": 995, "node_loss": 990, "durable": {"iteration": 900}},
        **{"nodes": nodes, "idle": [], "spares": ["spare0"]},
        **{"any_node": lost, "some_nodes": [], "more_pairs": 0},
        "pairs": [{**disk, "nodes": nodes[i : i + 4], "others": []} for i in range(0, 40, 4)],
        "watch": {"iteration_seconds": 0.5, "recovery": {"text": "training again 1.2 s after it"}},
    }
    return {"time": time.time(), "summary": summary, "ranks": ranks}


def shown(view: View | None = None, width: int = 80, height: int = 24) -> list[str]:
    entry = {**job(NODES), "nodes": {}, "supervised": True, "file": "", "age": 1.0}
    return list(screen("big", entry, view or View(), width, height))


def test_64_nodes_fit_on_a_small_terminal_or_the_chosen_one_is_in_sight() -> None:
    lines = shown()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "iteration 1000" in text and "losing any one node: iteration 990" in text
    assert "losing any two of node0, node1, node2 and node3: disk, iteration 900" in text
    assert "9 more losses" in text and "training again 1.2 s" in text
    for number, node in enumerate(NODES):
        assert any(f">{node} " in line for line in shown(View(chosen=number)))
    large = "\n".join(shown(height=40))
    assert all(f"{node} " in large for node in NODES)


@pytest.mark.parametrize(("key", "first"), [("n", "node0"), ("i", "node9"), ("s", "node63")])
def test_keys_sort(key: str, first: str) -> None:
    view = View()
    assert view.press(key)
    (line,) = [line for line in shown(view, width=40) if line.startswith(">")]
    assert line.startswith(f">{first} ")


def test_a_node_is_opened_and_closed() -> None:
    view = View(chosen=5)
    assert view.press("\n")
    text = "\n".join(shown(view))
    assert "node5: 8 ranks, iteration 965; rank 40 (training) has passed no mark for 0.5 s" in text
    assert "losing it: iteration 990 (10 iterations, about 5.0 s and a restart)" in text
    assert "and with it one of node4, node6, node7: disk, iteration 900" in text
    assert view.press("\n") and not view.opened and not view.press("q")


@pytest.mark.parametrize(("width", "height"), [(40, 24), (26, 6), (10, 2), (1, 1)])
def test_a_terminal_may_be_tiny(width: int, height: int) -> None:
    lines = shown(width=width, height=height)
    assert len(lines) <= height and all(len(line) <= width for line in lines)


def test_a_job_without_a_status_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["top", "--job", "a", "--state-dir", str(tmp_path)]) == 2
    assert "no supervisor of a has written a status" in capsys.readouterr().err


def test_keys_at_a_real_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a" / STATUS
    path.parent.mkdir(mode=0o700)
    path.write_text(json.dumps(job(NODES[:4])))
    path.chmod(0o600)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megatron_ft.cli.main", "top", "--job", "a"]
    process = subprocess.Popen(
        [*command, "--state-dir", str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), "COLUMNS": "", "LINES": ""},
    )
    os.close(theirs)
    said = ""

    def until(condition: Callable[[], bool], what: str) -> None:
        nonlocal said
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {said[-2000:]}"
            if select.select([ours], [], [], 0.5)[0]:
                said += os.read(ours, 65536).decode()

    try:
        until(lambda: "node3" in said, "no nodes")
        os.write(ours, b"j\r")
        until(lambda: "losing it" in said, "no node was opened")
        assert "rank 8" in said
        os.write(ours, b"q")
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def node(passes: int, *shards: str) -> dict[str, Any]:
    scrub = msgspec.structs.asdict(m.ScrubCounts(passes=passes, bytes_read=passes << 30))
    return {"scrub": scrub, "shards": dict.fromkeys(shards, {})}


@pytest.mark.parametrize(
    ("nodes", "least"),
    [
        ({"n0": node(4, "a"), "n1": node(3, "b"), "spare": node(0)}, 3),
        ({"n0": node(4, "a"), "n1": node(0, "b")}, 0),
        ({"spare": node(0)}, 0),
        ({"gone": {}}, 0),
    ],
)
def test_a_spare_has_nothing_to_scrub(nodes: dict[str, dict[str, Any]], least: int) -> None:
    line = _scrub_line({"nodes": nodes, "summary": {}})
    assert line.startswith(f"scrub: {least} passes"), line
