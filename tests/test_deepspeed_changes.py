"""Tensors of an engine that move, come, go or are replaced: what is captured, and what is kept."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = (
    "deepspeed_offload_cases:offloaded_memory_is_given_back",
    "deepspeed_offload_cases:states_move_when_no_copy_reads_them",
)


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("case", CASES)
def test_changes_of_an_engine(case: str, deepspeed_server: Any, tmp_path: Path) -> None:
    from fork_server import Request

    outcome = deepspeed_server.run(Request(case, [str(tmp_path / "arena")], 1, str(tmp_path), 60.0))
    assert not any(outcome.codes), outcome.story()
