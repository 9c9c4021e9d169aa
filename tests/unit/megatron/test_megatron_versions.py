"""A Megatron that lacks what is wrapped is refused, by name and before training."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.frameworks import MEGATRON, Required, check_release, version_numbers


def check(version: str, *required: Required) -> None:
    check_release(MEGATRON, version, required, "--inmem-snapshot")


@pytest.mark.parametrize("version", ["0.16.1", "0.12.0rc3", "0.9"])
def test_an_old_release_is_refused_and_working_ones_are_named(version: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"0\.17\.1, 0\.18\.2 and 0\.19\.2") as caught:
        check(version)
    assert version in str(caught.value)


@pytest.mark.parametrize("version", ["0.17.1", "0.19.2", "0.20.0rc1", "1.0"])
def test_a_newer_release_is_tried(version: str) -> None:
    check(version)


def test_a_release_candidate_counts_as_its_release() -> None:
    assert version_numbers("0.19.0rc1") == (0, 19)


def test_a_renamed_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check("0.30.0", Required("textwrap", "wrap", ("text", "columns")))
    assert "no parameter 'columns' of textwrap.wrap" in str(caught.value)
    assert "0.30.0" in str(caught.value) and MEGATRON.working in str(caught.value)
    assert "'text'" not in str(caught.value)


@pytest.mark.parametrize("owner", ["textwrap", "textwrap.TextWrapper", "no_such_module"])
def test_a_missing_function_class_or_module_is_refused_by_name(owner: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=f"no function {owner}.unwrap"):
        check("0.30.0", Required(owner, "unwrap"))


_PROGRAM = """
from megatron_ft.cli.demo import cpu_device
cpu_device.install()
from megatron.training import arguments, training
import megatron_ft.megatron as integration
names = ["setup_model_and_optimizer", "train", "checkpoint_and_decide_exit"]
before = [getattr(training, name) for name in names]
integration.install()
first = [getattr(training, name) for name in names]
integration.install()
assert first == [getattr(training, name) for name in names], "a second install wrapped again"
assert not set(before) & set(first), "not wrapped"
assert [f.__wrapped__ for f in first] == before, "not the original inside"
import argparse
parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
groups = [group for group in parser._action_groups if "in-memory snapshots" in group.title]
assert len(groups) == 1  # format_help is of no use: Megatron 0.19.2's own texts break it
options = [option for action in groups[0]._group_actions for option in action.option_strings]
assert "--inmem-snapshot" in options and "--inmem-snapshot-interval" in options
"""


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)
def test_the_real_megatron_is_wrapped_once_and_shows_the_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
