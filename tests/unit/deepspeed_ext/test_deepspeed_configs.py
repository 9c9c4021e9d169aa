"""configs/ds_*.json: each is what its name says, for DeepSpeed and for us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.training_command import settle
from megatron_ft.config.json_section import read_section

FOLDER = Path(__file__).parents[3] / "configs"
STAGES = {
    "ds_zero0_inmem": 0,
    "ds_zero1_inmem": 1,
    "ds_zero2_inmem": 2,
    "ds_zero3_inmem": 3,
    "ds_zero3_offload_inmem": 3,
    "ds_pipeline_inmem": 1,
}


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("ds_*.json")} == set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_the_supervisor_reads_the_section(name: str) -> None:
    path = FOLDER / f"{name}.json"
    section = read_section(json.loads(path.read_text()), path.name)
    assert section is not None and section.enabled
    command = ["python", "examples/deepspeed_gpt.py", "--deepspeed_config", str(path)]
    settings = settle({}, command, {})
    assert settings.protect == section.source.given["protect"] != "none"
    assert settings.snapshot_interval == section.source.given["snapshot_interval"]


_PARSE = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig

parsed = {}
for path in sys.argv[2:]:
    config = DeepSpeedConfig(path)
    zero = config.zero_config
    parts = (zero.offload_optimizer, zero.offload_param)
    parsed[path] = {
        "stage": int(zero.stage),
        "on_host": [part is not None and part.device == "cpu" for part in parts],
        "optimizer": config.optimizer_name,
        "schedule": config.scheduler_name,
        "bf16": config.bfloat16_config.enabled,
        "micro_batches": config.gradient_accumulation_steps,
    }
with open(sys.argv[1], "w") as file:
    json.dump(parsed, file)
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All files through DeepSpeed's parser, in one process, as its import takes long."""
    if find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    result = tmp_path_factory.mktemp("parsed") / "result.json"
    paths = [str(FOLDER / f"{name}.json") for name in STAGES]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, str(result), *paths],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return {Path(path).stem: values for path, values in found.items()}


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STAGES)
def test_deepspeed_accepts_the_file(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed[name]
    assert found["stage"] == STAGES[name]
    assert found["on_host"] == ["offload" in name] * 2
    assert (found["optimizer"], found["schedule"]) == ("adamw", "WarmupCosineLR")
    assert found["bf16"] is True
    # With fewer micro-batches than stages a pipeline is mostly empty.
    assert found["micro_batches"] >= (8 if "pipeline" in name else 1)
