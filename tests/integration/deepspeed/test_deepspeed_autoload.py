"""An unedited script gets its snapshots under every launcher that starts Python for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from megatron_ft.core.environment import JOB
from megatron_ft.core.startup import before_script
from tests.programs.deepspeed_program import ENVIRONMENT
from tests.support.deepspeed_cells import zero

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
    "deepspeed": [
        *("-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_addr", "127.0.0.1"),
        *("--master_port", "{port}"),
    ],
}

_SCRIPT = """
import argparse, sys, torch, deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
options = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(args=options, model=model)
print("replaced:", *sorted({"step", "load_checkpoint"} & vars(engine).keys()))
engine.load_checkpoint("nowhere")
"""


@pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=pytest.mark.all_layouts), "deepspeed"]
)
def test_the_key_alone_is_enough(launcher: str, tmp_path: Path) -> None:
    """What follows needs an SMP: outside a job its absence is said, with what to do."""
    from megatron_ft.core.process_tools import free_port

    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(_SCRIPT)
    config.write_text(json.dumps({**zero(1, "fp32"), "inmem_snapshot": {"enabled": True}}))
    words = [word.format(port=free_port()) for word in LAUNCHERS[launcher]]
    base = {**os.environ, **ENVIRONMENT, JOB: "job", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words, str(script), "--deepspeed_config", str(config)],
        env=before_script(base),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = done.stdout + done.stderr
    assert "replaced: load_checkpoint step" in said, said[-4000:]
    assert "NotUnderSupervisorError" in said and "megatron-ft run -- <command>" in said
    assert done.returncode != 0
