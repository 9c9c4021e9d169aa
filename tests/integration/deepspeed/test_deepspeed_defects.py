"""Defects of DeepSpeed, and what is guaranteed instead.

Each test shows both on the same engine.  One that fails in its first half says that DeepSpeed
has mended something: then what we do about it can go.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from deepspeed_ext import checkpoint_engine  # noqa: E402
from tests.programs.deepspeed_saving_program import notes_of  # noqa: E402
from tests.support.fork_server import ForkServer  # noqa: E402

pytestmark = pytest.mark.deepspeed


def test_latest_names_a_checkpoint_that_lacks_a_file(
    deepspeed_server: ForkServer, tmp_path: Path
) -> None:
    # Ours: test_deepspeed_saving.py, test_latest_waits_for_a_slow_rank.
    (_, rank_1) = notes_of(deepspeed_server, tmp_path, "plain", 2)
    assert rank_1 == {"named": "slow", "present": False}


def test_the_fast_engine_cannot_load_what_it_saved(
    deepspeed_server: ForkServer, tmp_path: Path
) -> None:
    (notes,) = notes_of(deepspeed_server, tmp_path, "fast", 1)
    assert "Weights only load failed" in notes["plain"]
    assert notes["ours"] == ""


def test_a_file_gets_stages_in_place_of_all_attributes() -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    assert checkpoint_engine._stage(ZeroStageEnum, "gradients") is ZeroStageEnum.gradients
    with pytest.raises(TypeError, match="only a ZeRO stage"):
        checkpoint_engine._stage(type(checkpoint_engine), "__subclasses__")


def test_the_fast_engine_needs_what_only_deepspeeds_launcher_sets(
    deepspeed_server: ForkServer, tmp_path: Path
) -> None:
    # Nothing of ours: it fails before there is an engine to wrap.
    (notes,) = notes_of(deepspeed_server, tmp_path, "fast_under_torchrun", 1)
    assert notes["plain"] == "KeyError: 'CROSS_SIZE'"


@pytest.fixture(scope="module")
def decoupled(deepspeed_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    (notes,) = notes_of(deepspeed_server, tmp_path_factory.mktemp("decoupled"), "decoupled", 1)
    return notes


@pytest.mark.slow
def test_the_decoupled_engine_cannot_save_zero_2(decoupled: Any) -> None:
    assert "refusing to serialize non-leaf tensor" in decoupled["plain_zero2"]
    assert decoupled["ours_zero2"] == "" and decoupled["latest_zero2"] == "one"


@pytest.mark.slow
def test_the_decoupled_engine_cannot_load_what_it_saved(decoupled: Any) -> None:
    assert "Weights only load failed" in decoupled["plain_zero2_loaded"]
    assert decoupled["ours_zero2_loaded"] == ""


@pytest.mark.slow
def test_the_last_decoupled_save_never_reaches_latest(decoupled: Any) -> None:
    assert decoupled["plain_zero3_at_save"] == ""
    assert decoupled["plain_zero3_a_step_later"] == "one"
    assert decoupled["plain_zero3_at_end"] == "one", "the second save was to be named"
    # Ours commits inside save_checkpoint, and ends the writer when the engine is destroyed.
    assert decoupled["latest_zero2"] == "one" and decoupled["writer_ended"]
