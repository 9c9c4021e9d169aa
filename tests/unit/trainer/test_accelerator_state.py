"""Backends of Accelerate that are refused, and names of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.accelerator_state import (
    InMemoryState,
    number_saves,
    unsupported,
)


def accelerator(kind: str = "MULTI_GPU", **changed: Any) -> Any:
    """The attributes of an Accelerator that are looked at."""
    given: dict[str, Any] = {
        "distributed_type": SimpleNamespace(value=kind),
        "is_fsdp2": False,
        "parallelism_config": None,
        "has_lomo_optimizer": False,
        "_models": [1],
        "_optimizers": [1],
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_backends_that_are_supported(kind: str) -> None:
    assert unsupported(accelerator(kind)) == ""
    assert unsupported(accelerator("FSDP", is_fsdp2=True)) == ""


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (accelerator("FSDP"), "FullyShardedDataParallelPlugin(fsdp_version=2)"),
        (accelerator("DEEPSPEED"), "of deepspeed_ext: import it from there"),
        (accelerator("MEGATRON_LM"), "train with Megatron-LM itself"),
        (accelerator("XLA"), "of XLA is not supported: use SnapshotManager"),
        (accelerator("MULTI_NPU"), "of MULTI_NPU is not supported: use SnapshotManager"),
        (
            accelerator(parallelism_config=SimpleNamespace(non_data_parallel_size=2)),
            "set their sizes to 1",
        ),
        (accelerator(has_lomo_optimizer=True), "use an optimizer that does so in step()"),
        (accelerator(_models=[]), "make it behind accelerator.prepare"),
    ],
)
def test_others_are_refused_with_a_remedy(given: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        InMemoryState(given)
    assert remedy in str(refused.value)


def test_ranks_that_accelerate_takes_for_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Accelerator(cpu=True)" in unsupported(accelerator("NO"))


def test_automatic_checkpoints_are_numbered_behind_those_that_exist(tmp_path: Path) -> None:
    config = SimpleNamespace(
        automatic_checkpoint_naming=True, iteration=0, project_dir=str(tmp_path)
    )
    one = SimpleNamespace(project_configuration=config)
    number_saves(one)
    assert config.iteration == 0
    for number in (9, 10):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    number_saves(one)
    assert config.iteration == 11
