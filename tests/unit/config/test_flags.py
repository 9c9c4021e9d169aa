"""The --inmem-* flags of a training command, read by the supervisor."""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.cli.training_command import SHARED, settle
from megatron_ft.config import SETTINGS, SWITCH, SnapshotConfig
from megatron_ft.config.flags import add_flags, attribute_of, read_command
from megatron_ft.core.errors import ConfigError

FLAGS = [SWITCH, *(setting.flag for setting in SETTINGS.values())]
WORDS = st.one_of(
    st.sampled_from([*FLAGS, "--inmem-protect=xor:4", "--inmem-slots=3", "--inmem-slots="]),
    st.sampled_from(["python", "pretrain_gpt.py", "--lr", "1e-4", "-c", "-1", "2", "", "a b"]),
    st.sampled_from(["rs:3+1", "xor:4", "raid5", "--inmem-snapshots", "--inmem", "--"]),
)


def as_megatron_parses(words: list[str]) -> dict[str, Any] | None:
    """The values on Megatron's arguments, whose parser has flags of its own; None if refused."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--lr")
    add_flags(parser.add_argument_group())
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parsed, unknown = parser.parse_known_args([word for word in words if word != "--"])
    except SystemExit:
        return None
    if any(word.startswith("--inmem-") for word in unknown):
        return None
    return {name: getattr(parsed, attribute_of(name)) for name in SETTINGS}


@given(st.lists(WORDS, max_size=8))
def test_the_supervisor_reads_what_the_training_program_will(words: list[str]) -> None:
    expected = as_megatron_parses(words)
    try:
        read = read_command(words)
    except ConfigError:
        assert expected is None
        return
    if expected is None:
        assert "--lr" in words, "refused for a flag that only Megatron knows"
        return
    assert read.source.values == expected
    assert read.enabled == (SWITCH in words)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "snapshot_interval": st.integers(1, 99),
        "protect": st.sampled_from(["none", "xor:4", "rs:6+2"]),
        "arena_dir": st.sampled_from(["/dev/shm/mine", "/a b/c=d"]),
        "fence_timeout_seconds": st.floats(0.5, 99),
    },
)
FOREIGN = st.lists(st.sampled_from(["--lr", "1e-4", "--bf16", "x y", "-c", "--save=/x"]))


@given(VALUES, FOREIGN, FOREIGN, st.booleans(), st.booleans())
def test_flags_are_found_wherever_they_stand(
    values: dict[str, Any], before: list[str], after: list[str], joined: bool, switched: bool
) -> None:
    words = [*before, *([SWITCH] if switched else [])]
    for name, value in values.items():
        flag = SETTINGS[name].flag
        words += [f"{flag}={value}"] if joined else [flag, str(value)]
    read = read_command([*words, *after])
    assert read.enabled == switched
    assert settle({}, [*words, *after], {}) == SnapshotConfig(**values)
    assert read.without_effect == [
        SETTINGS[n].flag for n in SETTINGS if n in values and not switched
    ]


def test_a_separator_of_a_wrapper_hides_no_flag() -> None:
    assert read_command(["env", "A=1", "--", "python", "train.py", SWITCH]).enabled


def test_the_last_of_several_counts() -> None:
    command = ["train.py", SWITCH, "--inmem-slots", "3", "--inmem-slots=2"]
    assert settle({}, command, {}).slots == 2


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--inmem-snapshots", "--inmem-snapshot"),
        ("--inmem-protection", "--inmem-protect"),
        ("--inmem-interval=3", "--inmem-drain-interval"),
        ("--inmem-xyz", "known: --inmem-snapshot, "),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command(["python", "pretrain_gpt.py", flag])
    assert f"unknown flag {flag.partition('=')[0]}" in str(caught.value)
    assert nearest in str(caught.value)


@pytest.mark.parametrize("words", [["--inmem-protect"], ["--inmem-protect", "--bf16"]])
def test_a_flag_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--inmem-protect: expected one argument"):
        read_command(words)


def test_a_token_without_a_port_stops_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--metrics-token-file", "token", "--", "true"]) == 2
    assert "--metrics-token-file is for --metrics PORT" in capsys.readouterr().err


def test_a_flag_counts_before_the_environment_and_that_before_the_default() -> None:
    environment = {"MEGATRON_FT_SLOTS": "3", "MEGATRON_FT_PROTECT": "none"}
    settings = settle({"protect": "xor:4"}, [SWITCH], environment)
    assert (settings.protect, settings.slots, settings.drain_keep) == ("xor:4", 3, 2)


def test_flags_on_both_sides_must_agree_and_both_are_named() -> None:
    command = ["train.py", SWITCH, "--inmem-protect", "rs:3+1", "--inmem-slots=3"]
    assert settle({"protect": "rs:3+1"}, command, {}).slots == 3
    with pytest.raises(ConfigError) as caught:
        settle({"protect": "xor:4", "slots": 2}, command, {})
    for part in ("--protect` is xor:4", "--inmem-protect is rs:3+1"):
        assert part in str(caught.value)
    for part in ("--slots` is 2", "--inmem-slots is 3"):
        assert part in str(caught.value)


def test_flags_that_do_nothing_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    settle({}, ["train.py", "--inmem-protect", "xor:4"], {})
    said = capsys.readouterr().err
    assert "--inmem-protect" in said and f"but not {SWITCH}" in said
    settle({}, ["train.py"], {})  # a loop of the user's own needs no flag
    settle({}, ["train.py", SWITCH, "--inmem-protect", "xor:4"], {})
    assert capsys.readouterr().err == ""


def test_bad_values_in_the_command_stop_run_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training = ["--", "python", "train.py", SWITCH]
    for flags, said in (
        (["--inmem-snapshot-interval=0"], "--inmem-snapshot-interval is 0; give a whole number"),
        (["--inmem-protect", "raid5"], "unknown redundancy scheme 'raid5'"),
        (["--inmem-protect", "rs:9+1"], "rs:9+1 needs 10 nodes, there are 2"),
        (["--inmem-lease-seconds", "1"], "a lease of 1 s is too short"),
        (["--inmem-snapshot-every=3"], "did you mean --inmem-snapshot"),
    ):
        assert cli.main(["run", "--nodes", "2", *training, *flags]) == 2
        assert said in capsys.readouterr().err


def test_run_has_a_flag_for_every_setting_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    for setting in SHARED:
        assert f"{setting.run_flag} {setting.metavar}" in shown
        assert setting.default is None or f"default: {setting.shown_default}" in shown


def test_the_documentation_has_the_table_of_these_flags() -> None:
    script = Path(__file__).parents[3] / "scripts" / "flags_table.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


_TELL = """
import os, pathlib, sys
told = os.environ["MEGATRON_FT_PROTECT"], os.environ["MEGATRON_FT_LEASE_SECONDS"]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(told))
"""


def test_trainers_are_told_what_run_read_in_their_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", _TELL, str(tmp_path), SWITCH, "--inmem-protect=xor:2"]
    options = ["--job", f"test-{uuid.uuid4().hex[:8]}", "--state-dir", str(tmp_path / "state")]
    options += ["--nodes", "2", "--lease-seconds", "5"]
    # Below tmp_path the sockets' paths could be too long.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arenas:
        options += ["--arena-dir", arenas]
        assert cli.main(["run", *options, "--", *command]) == 0, capfd.readouterr()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["xor:2 5.0", "xor:2 5.0"]
