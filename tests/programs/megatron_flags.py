"""Megatron's parser and hooks, each looked at in a process that the tests' host has forked."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import megatron_ft.megatron as integration
from megatron_ft.cli.demo import demo_model
from megatron_ft.core.errors import ConfigError


def parse() -> None:
    """The flags of each launch in a file, as Megatron's parser and checks take them."""
    integration.install()
    from megatron.training import arguments

    source, target = map(Path, sys.argv[1:])
    parsed = {}
    for name, launch in json.loads(source.read_text()).items():
        os.environ["WORLD_SIZE"] = str(launch["nodes"] * launch["gpus"])
        sys.argv = ["pretrain_gpt.py", *launch["flags"], "--tokenizer-type", "NullTokenizer"]
        with contextlib.redirect_stdout(io.StringIO()):
            args = arguments.validate_args(arguments.parse_args())
        plain = (int, float, str, bool, type(None))
        parsed[name] = {n: v for n, v in vars(args).items() if isinstance(v, plain)}
    target.write_text(json.dumps(parsed))


def refuse_conflicts() -> None:
    """Conflicts of flags are refused by Megatron's own validation."""
    integration.install()
    from megatron.training import arguments, yaml_arguments

    def refused(*flags: str) -> str:
        sys.argv = ["train.py", *demo_model.demo_arguments(iterations=2, data_path="/none"), *flags]
        try:
            arguments.validate_args(arguments.parse_args())
        except ConfigError as error:
            return str(error)
        return ""

    assert refused() == ""
    assert refused("--inmem-snapshot") == ""
    assert refused("--skip-train") == "", "no snapshots, no conflict"
    conflicting = ["--inprocess-restart", "--skip-train"]
    said = refused("--inmem-snapshot", *conflicting, "--inmem-snapshot-interval=0")
    for part in ("--inprocess-restart: ", "--skip-train: ", "--inmem-snapshot-interval is 0"):
        assert part in said, said
    assert hasattr(yaml_arguments.validate_yaml, "__wrapped__")


def wrap_once() -> None:
    """The functions of Megatron's loop are wrapped once, and its parser has our flags."""
    from megatron.training import arguments, training

    names = ["setup_model_and_optimizer", "train", "checkpoint_and_decide_exit"]
    before = [getattr(training, name) for name in names]
    integration.install()
    first = [getattr(training, name) for name in names]
    integration.install()
    assert first == [getattr(training, name) for name in names], "a second install wrapped again"
    assert not set(before) & set(first), "not wrapped"
    assert [f.__wrapped__ for f in first] == before, "not the original inside"
    assert not any(hasattr(f, "__wrapped__") for f in before), "wrapped before"
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    groups = [group for group in parser._action_groups if "in-memory snapshots" in group.title]
    # format_help is of no use: Megatron 0.19.2's own texts break it.
    assert len(groups) == 1
    options = [option for action in groups[0]._group_actions for option in action.option_strings]
    assert "--inmem-snapshot" in options and "--inmem-snapshot-interval" in options
