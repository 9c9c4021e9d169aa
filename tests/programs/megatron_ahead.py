"""A trainer host of the demo: Megatron is imported with hooks, and a parser reads no sources."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from typing import Any

from megatron_ft.core.environment import START
from megatron_ft.launchers import trainer_host

command = [sys.executable, "-m", "megatron_ft.cli.demo.pretrain_gpt", "--inmem-snapshot"]
host = trainer_host.Host("host.sock", dict(os.environ))
host.preload(trainer_host.modules_of(command))
assert "megatron_ft.cli.demo.gpt_training" in sys.modules, "the demo's script does not import it"
from megatron.training import argument_utils, arguments, initialize, training  # noqa: E402

assert hasattr(training.train, "__wrapped__"), "no hooks"
assert initialize._warmup_jit_function.__name__ == "<lambda>", "Megatron came before the stand-in"

factory = argument_utils.ArgumentGroupFactory
read = factory._get_field_docstrings


class Anew:
    _get_field_docstrings = read.__wrapped__


for source in (argument_utils.TransformerConfig, argument_utils.TrainingConfig):
    factory.__init__(made := factory.__new__(factory), source)
    assert made.field_docstrings == Anew()._get_field_docstrings(source) != {}


def fail(*_: Any) -> Any:
    raise AssertionError("sources are read again")


ast.parse = fail  # type: ignore[assignment]
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
assert any(group.title == "in-memory snapshots (megatron-ft)" for group in parser._action_groups)

from megatron_ft.megatron import hooks  # noqa: E402

imported = training._TRAIN_START_TIME
hooks.install_for_script()
assert training._TRAIN_START_TIME == imported, "this process has imported Megatron itself"
forked = time.time()
os.environ[START] = "warm"
hooks.install_for_script()
assert training._TRAIN_START_TIME >= forked, "--exit-duration-in-mins counts from an import"
