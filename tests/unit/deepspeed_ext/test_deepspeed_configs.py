"""configs/ds_*.json: each is what its name says, for DeepSpeed and for us."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STAGES)
def test_deepspeed_accepts_the_file(name: str) -> None:
    parser = pytest.importorskip("deepspeed.runtime.config")
    config = parser.DeepSpeedConfig(str(FOLDER / f"{name}.json"))
    zero = config.zero_config
    assert int(zero.stage) == STAGES[name]
    on_host = [
        part is not None and part.device == "cpu"
        for part in (zero.offload_optimizer, zero.offload_param)
    ]
    assert on_host == ["offload" in name] * 2
    assert (config.optimizer_name, config.scheduler_name) == ("adamw", "WarmupCosineLR")
    assert config.bfloat16_config.enabled is True
    # With fewer micro-batches than stages a pipeline is mostly empty.
    assert config.gradient_accumulation_steps >= (8 if "pipeline" in name else 1)
