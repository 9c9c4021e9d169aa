"""Lines of ``megatron-ft status``, from the answers of nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megatron_ft.cli.status import _scrub_line
from megatron_ft.rpc import messages as m


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
