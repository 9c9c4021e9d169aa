"""What cannot be captured is refused by name; what can be is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.unsupported import REFUSALS, config_refusals
from megatron_ft.config import Source
from megatron_ft.config.json_section import Section
from megatron_ft.core.errors import ConfigError, UnsupportedVersionError
from megatron_ft.trainer import teardown
from megatron_ft.trainer.resilient import RestartClient

# Tests import DeepSpeed, not this module: that takes seconds in every worker.
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"),
]

PLAIN = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **section}}


NVME = {"device": "nvme", "nvme_path": "/nvme"}

REFUSED = {
    "zero_optimization.offload_optimizer.device": zero(offload_optimizer=NVME),
    "zero_optimization.offload_param.device": zero(offload_param=NVME),
    "zero_optimization.offload_optimizer.super_offload": zero(
        offload_optimizer={"device": "cpu", "super_offload": True}
    ),
    "zero_optimization.offload_optimizer.ratio": zero(
        offload_optimizer={"device": "cpu", "ratio": 0.5}
    ),
    "zero_optimization.zenflow": zero(zenflow={"overlap_step": True}),
    "zero_optimization.zero_quantized_nontrainable_weights": zero(
        zero_quantized_nontrainable_weights=True
    ),
    "compile.deepcompile": {"compile": {"deepcompile": True, "offload_opt_states": True}},
    "checkpoint.writer": {"checkpoint": {"writer": {"type": "FAST"}}},
    "datastates_ckpt": {"datastates_ckpt": {"host_cache_size": 16}},
    "hybrid_engine.enabled": {"hybrid_engine": {"enabled": True}},
    "data_efficiency.data_sampling.curriculum_learning.enabled": {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            },
        }
    },
    "zero_optimization.zeropp_loco_param": zero(
        zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024}
    ),
    "zero_optimization.mics_shard_size": zero(mics_shard_size=2),
    "amp.enabled": {"amp": {"enabled": True}},
    "compression_training": {"compression_training": {"layer_reduction": {"enabled": True}}},
    "quantize_training.enabled": {"quantize_training": {"enabled": True}},
}

REMOVED = {
    "zero_optimization.zeropp_loco_param",
    "zero_optimization.mics_shard_size",
    "amp.enabled",
    "compression_training",
    "quantize_training.enabled",
}
"""DeepSpeed rejects these itself since 0.19; older releases leave it to us."""

OLDER = Path(__file__).parents[3] / ".venv" / "deepspeed" / "0.18.9"

_JUDGE = """
import json, sys
from deepspeed import __version__
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed_ext.unsupported import config_refusals
with open(sys.argv[1]) as file:
    configs = json.load(file)
said = {key: config_refusals(DeepSpeedConfig(config)) for key, config in configs.items()}
with open(sys.argv[1], "w") as file:
    json.dump({"release": __version__, "said": said}, file)
"""

TAKEN = {
    "plain": {},
    "zero 2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "offload": zero(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
    "no offload": zero(offload_optimizer={"device": "none"}, offload_param={"device": "none"}),
    "ratio without offload": zero(offload_optimizer={"device": "none", "ratio": 0.5}),
    "zero++": zero(zero_hpz_partition_size=2, zero_quantized_weights=True),
    "bf16 masters": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "universal": {"checkpoint": {"load_universal": True}},
    "compile": {"compile": {"deepcompile": False}},
    "hybrid engine off": {"hybrid_engine": {"enabled": False}},
}


def refusals_of(section: dict[str, Any]) -> list[str]:
    """The lines that we answer to a configuration that DeepSpeed takes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return config_refusals(DeepSpeedConfig({**PLAIN, **section}))


def keys_of(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


@pytest.mark.parametrize("key", [key for key in REFUSED if key not in REMOVED])
def test_refused_by_us(key: str) -> None:
    assert keys_of(refusals_of(REFUSED[key])) == [key]


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_refused_by_deepspeed_before_us(key: str) -> None:
    """Once it does not, the key belongs to the others."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError):
        refusals_of(REFUSED[key])


@pytest.mark.all_layouts
def test_all_are_refused_by_us_where_an_older_deepspeed_takes_them(tmp_path: Path) -> None:
    if not OLDER.is_dir():
        pytest.skip(f"needs deepspeed {OLDER.name} in {OLDER}: run scripts/test.sh")
    file = tmp_path / "configs.json"
    file.write_text(json.dumps({key: {**PLAIN, **REFUSED[key]} for key in REFUSED}))
    paths = os.pathsep.join(map(str, (OLDER, OLDER.parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE, str(file)],
        env={**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(file.read_text())
    assert answer["release"] == OLDER.name
    assert {key: keys_of(lines) for key, lines in answer["said"].items()} == {
        key: [key] for key in REFUSED
    }


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "muon"])
def test_optimizers_refused(name: str) -> None:
    lines = refusals_of({"optimizer": {"type": name, "params": {}}})
    assert keys_of(lines) == ["optimizer.type"]


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    assert refusals_of(TAKEN[name]) == []


def test_one_plain_line_each() -> None:
    for refusal in REFUSALS:
        line = f"{refusal.key}: {refusal.reason}"
        assert "\n" not in line
        assert len(line) < 200
        assert "; " in line


def test_all_reasons_at_once() -> None:
    both = zero(offload_optimizer=NVME, offload_param=NVME)
    lines = refusals_of({**both, "hybrid_engine": {"enabled": True}})
    assert len(lines) == 3


def test_fewer_ranks_are_refused_where_the_batch_would_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed_ext import attachment

    monkeypatch.setattr(attachment, "refusals", lambda engine: [])
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict={}))
    folders = {"drain_dir": "/drains", "drain_interval": 1, "drain_export_dir": "/exports"}
    stops = Section(True, Source({**folders, "on_no_spare": "stop"}, str), {})
    assert attachment._checked(engine, stops).on_no_spare == "stop"
    shrinks = Section(True, Source({**folders, "on_no_spare": "shrink"}, str), {})
    with pytest.raises(ConfigError, match='shrink: the global batch .*give "train_batch_size"'):
        attachment._checked(engine, shrinks)


@pytest.mark.parametrize("entered", [False, True])
def test_a_release_that_cannot_be_left_declines_restarts_in_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entered: bool
) -> None:
    """It is refused when training begins, or when the training function imports DeepSpeed."""
    from deepspeed_ext import reentry, unsupported

    left: list[str] = []
    client = SimpleNamespace(close=lambda: left.append("left")) if entered else None
    newest = unsupported.DEEPSPEED._replace(oldest=(99,))
    monkeypatch.setattr(unsupported, "DEEPSPEED", newest)
    monkeypatch.setattr(teardown, "_preparations", [])
    monkeypatch.setattr(RestartClient, "current", client)
    reentry.install()
    assert ("is too old" in caplog.text) is entered and left == ["left"] * entered
    with pytest.raises(UnsupportedVersionError, match="is too old"):
        teardown.ProcessState()


def test_no_module_hides_the_public_function() -> None:
    """Importing ``attachment`` binds a name in the package, which must not be ``attach``."""
    import deepspeed_ext.attachment

    assert callable(deepspeed_ext.attach)
