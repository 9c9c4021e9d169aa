"""A defect of DeepSpeed.  Once this fails, what we do about it can go."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.programs.deepspeed_saving_program import notes_of
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.deepspeed


def test_latest_names_a_checkpoint_that_lacks_a_file(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    # Ours: test_deepspeed_saving.py, test_latest_waits_for_a_slow_rank.
    (_, rank_1) = notes_of(deepspeed_server, tmp_path, "plain", 2)
    assert rank_1 == {"named": "slow", "present": False}
