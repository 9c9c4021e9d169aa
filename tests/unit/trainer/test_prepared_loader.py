"""Accelerate: loaders that it has prepared, stopped anywhere; backends refused; names on disk."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate", allow_module_level=True)

from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.objects import decode, encode
from megatron_ft.trainer import accelerator_state, resumable_loader
from megatron_ft.trainer.accelerator_state import InMemoryState, number_saves, unsupported
from megatron_ft.trainer.prepared_loader import watch
from megatron_ft.trainer.state import RngState
from tests.support.loader_runs import new_process, passes
from tests.unit.trainer.test_loader_positions import LOADERS, PER_PASS, STREAMS

KINDS = ("numpy Generator", "a list that is shuffled", "noisy samples", "stream", "weighted")
CONFIGURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "dispatch": {"dispatch_batches": True},
    "split": {"split_batches": True},
    "seedable": {"use_seedable_sampler": True},
}


def prepared(kind: str, seed: int, configured: str, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    new_process(seed)
    accelerator_state._forget()
    config = DataLoaderConfiguration(**CONFIGURED[configured])
    one = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(1)
    return one.prepare({**LOADERS, **STREAMS}[kind](**options))


@pytest.mark.parametrize("stop", [1, 3, PER_PASS, 8, 2 * PER_PASS])
@pytest.mark.parametrize("configured", CONFIGURED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_are_those_of_a_run_without_stop(kind: str, configured: str, stop: int) -> None:
    check(kind, configured, stop)


@pytest.mark.parametrize("stop", [PER_PASS, pytest.param(8, marks=pytest.mark.all_layouts)])
def test_so_they_are_with_workers_that_persist(stop: int) -> None:
    check("drop last", "plain", stop, num_workers=1, persistent_workers=True)
    check("shuffled by the process", "plain", stop, num_workers=1, persistent_workers=True)


def check(kind: str, configured: str, stop: int, **options: Any) -> None:
    whole = prepared(kind, 1, configured, **options)
    expected = [b.tolist() for b in islice(passes(whole), stop + 8)]
    loader = prepared(kind, 1, configured, **options)
    watch(loader)
    data = passes(loader)
    used = [next(data).tolist() for _ in range(stop)]
    places = resumable_loader.positions()
    assert [place["trace"] is None for place in places.values()] == [False]
    stored = encode((places, RngState().state_dict()))
    loader = prepared(kind, 77, configured, **options)
    watch(loader)
    places, states = decode(stored)
    resumable_loader.set_positions(places)
    RngState().load_state_dict(states)
    assert used + [b.tolist() for b in islice(passes(loader), 8)] == expected
    accelerator_state._forget()


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
