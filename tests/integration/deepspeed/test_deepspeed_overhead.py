"""What a capture of DeepSpeed's live tensors costs training."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.support.warm_host import Request, WarmHost

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

LIMIT = 1.3
"""Of the processor time of one copy of the same bytes, right after it, in pieces as large.

Counted is the lower quartile of the rounds: whatever shares a core or its caches with one side of a
round makes that side slow.  Seen beside two busy processes: 1.03 to 1.06; a second pass is 2.
"""


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder where arenas are in a real job."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-ft-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.all_layouts
def test_a_capture_costs_one_copy_and_nothing_else(
    deepspeed_server: WarmHost, shared_memory: Path, tmp_path: Path
) -> None:
    request = Request(
        "tests.programs.deepspeed_overhead:measure", [str(shared_memory)], 2, str(tmp_path), 120.0
    )
    outcome = deepspeed_server.run(request)
    assert not any(outcome.codes), outcome.story()
    for rank in range(request.ranks):
        found = json.loads((shared_memory / f"rank{rank}.json").read_text())
        assert found["taken"] == len(found["capture"])
        assert found["bytes"]["captured"] == found["bytes"]["memcpy"]
        assert set(found["calls"]) == {"0 collectives"}
        rounds = zip(found["capture"], found["memcpy"], strict=True)
        ratio = quantiles([ours / plain for ours, plain in rounds], n=4)[0]
        print(f"rank {rank}: {ratio:.2f} of a memcpy's processor time")
        assert ratio < LIMIT, f"rank {rank}: {ratio:.2f} of a memcpy"
