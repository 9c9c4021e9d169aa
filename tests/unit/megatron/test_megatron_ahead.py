"""Megatron as a trainer host prepares it before it forks, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("megatron") is None or find_spec("megatron.training") is None,
        reason="needs megatron-core with megatron.training",
    ),
]

_PROGRAM = """
import argparse, ast, os, sys, time
from megatron_ft.launchers import trainer_host

command = [sys.executable, "-m", "megatron_ft.cli.demo.pretrain_gpt", "--inmem-snapshot"]
host = trainer_host.Host("host.sock", dict(os.environ))
host.preload(trainer_host.modules_of(command))
assert "megatron_ft.cli.demo.gpt_training" in sys.modules, "the demo's script does not import it"
from megatron.training import argument_utils, arguments, initialize, training
assert hasattr(training.train, "__wrapped__"), "no hooks"
assert initialize._warmup_jit_function.__name__ == "<lambda>", "Megatron came before the stand-in"

factory = argument_utils.ArgumentGroupFactory
read = factory._get_field_docstrings

class Anew:
    _get_field_docstrings = read.__wrapped__

for source in (argument_utils.TransformerConfig, argument_utils.TrainingConfig):
    factory.__init__(made := factory.__new__(factory), source)
    assert made.field_docstrings == Anew()._get_field_docstrings(source) != {}

def fail(*_):
    raise AssertionError("sources are read again")

ast.parse = fail
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
assert any(group.title == "in-memory snapshots (megatron-ft)" for group in parser._action_groups)

from megatron_ft.core.environment import START
from megatron_ft.megatron import hooks
imported = training._TRAIN_START_TIME
hooks.install_for_script()
assert training._TRAIN_START_TIME == imported, "this process has imported Megatron itself"
forked = time.time()
os.environ[START] = "warm"
hooks.install_for_script()
assert training._TRAIN_START_TIME >= forked, "--exit-duration-in-mins counts from an import"
"""


def test_a_host_of_the_demo_has_megatron_with_hooks_and_a_parser(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as a host is started
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "left to the trainers" not in done.stderr
