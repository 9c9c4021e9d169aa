"""The JSON section: the same settings as the flags, with types, and no misspelling passes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.training_command import settle
from megatron_ft.config import SnapshotConfig, resolve
from megatron_ft.config.flags import job_contradictions
from megatron_ft.config.json_section import read_command, read_section
from megatron_ft.core.errors import ConfigError


def _write(folder: Path, **section: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "inmem_snapshot": section}))
    return path


def test_every_setting_has_its_name_and_default_of_the_flags() -> None:
    section = read_section({"inmem_snapshot": {"enabled": True}})
    assert section is not None and section.enabled
    assert resolve(section.source) == SnapshotConfig()
    values = {"slots": 3, "protect": "xor:4", "lease_seconds": 20, "arena_dir": "/dev/shm/x"}
    section = read_section({"inmem_snapshot": {"enabled": True, **values}})
    assert section is not None
    given = dataclasses.asdict(resolve(section.source))
    assert {n: str(given[n]) for n in values} == {
        "slots": "3",
        "protect": "xor:4",
        "lease_seconds": "20.0",
        "arena_dir": "/dev/shm/x",
    }


def test_no_section_and_one_that_is_off() -> None:
    assert read_section({"train_batch_size": 8}) is None
    section = read_section({"inmem_snapshot": {"slots": 3}})
    assert section is not None and not section.enabled


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"enable": True}, 'has an unknown key "enable"; did you mean enabled?'),
        ({"protection": "xor:2"}, 'unknown key "protection"; did you mean protect?'),
        ({"enabled": "true"}, 'inmem_snapshot.enabled is "true"; give true or false'),
        ({"enabled": bool}, "inmem_snapshot.enabled is \"<class 'bool'>\"; give true or false"),
        ({"follows_engine": 1}, "inmem_snapshot.follows_engine is 1; give true or false"),
        ({3: True}, 'has an unknown key "3"'),
        ({"drain_keep": "3"}, 'inmem_snapshot.drain_keep is "3"; give a whole number'),
        ({"slots": True}, "inmem_snapshot.slots is true; give 2, 3 or auto"),
        ({"slots": 4}, "inmem_snapshot.slots is 4; give 2, 3 or auto"),
        ({"snapshot_interval": 2.5}, "snapshot_interval is 2.5; give a whole number >= 1"),
        ({"protect": ["rs", 3]}, 'protect is ["rs", 3]; give xor:N'),
        ({"protect": "raid5"}, "unknown redundancy scheme 'raid5'"),
        ({"client_state": {"step": "global_step"}}, "did you mean global_steps?"),
        ({"client_state": ["step"]}, 'client_state is ["step"]; give for example {"step"'),
        (True, '"inmem_snapshot" is true; give {"enabled": true}'),
        (bool, '"inmem_snapshot" is "<class \'bool\'>"; give {"enabled": true}'),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_right_one(section: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_section({"inmem_snapshot": section}, "ds.json")
    assert said in str(caught.value) and str(caught.value).count("ds.json") == 1


@pytest.mark.parametrize(
    "name", ["inmem_snapshots", "inmem-snapshot", "InMem_Snapshot", "inmemsnapshot"]
)
def test_a_misspelt_section_is_no_job_without_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f'ds.json has a key "{name}"; did you mean inmem_snap'):
        read_section({"train_batch_size": 8, name: {"enabled": True}}, "ds.json")


@pytest.mark.parametrize("name", ["_inmem_snapshot", "#inmem_snapshot", "snapshot", "mem_snapshot"])
def test_other_keys_and_those_commented_out_are_not_the_section(name: str) -> None:
    assert read_section({name: {"enabled": True}}) is None


def test_the_file_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = _write(tmp_path, enabled=True)
    path.write_bytes(b'{"inmem_snapshot": {"enabled": true, "drain_dir": "/b\xc3\xbcro"}}')
    called = f"read_command(['--deepspeed', {str(path)!r}])"
    told = f"from megatron_ft.config.json_section import read_command; print({called})"
    shown = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", told],
        env={
            **os.environ,
            "LC_ALL": "POSIX",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
    assert "/büro" in shown.stdout, shown.stderr


def test_all_that_is_wrong_comes_in_one_list() -> None:
    with pytest.raises(ConfigError) as caught:
        read_section({"inmem_snapshot": {"slot": 3, "protect": 3, "enabled": 1}})
    assert str(caught.value).startswith("3 settings are wrong:")


@pytest.mark.parametrize("flags", [["--deepspeed_config", "{}"], ["--deepspeed={}"]])
def test_run_reads_the_file_that_the_command_names(tmp_path: Path, flags: list[str]) -> None:
    path = str(_write(tmp_path, enabled=True, protect="xor:2", slots=3))
    command = ["python", "train.py", *(word.format(path) for word in flags)]
    settings = settle({}, command, {"MEGATRON_FT_SLOTS": "2"})
    assert (settings.protect, settings.slots) == ("xor:2", 3)
    with pytest.raises(
        ConfigError, match=r"--protect` is xor:4, but .*ds.json: inmem_snap"
    ) as caught:
        settle({"protect": "xor:4"}, command, {})
    assert "inmem_snapshot.protect is xor:2" in str(caught.value)


def test_a_section_that_is_off_sets_nothing_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, protect="xor:2")
    settings = settle({}, ["train.py", "--deepspeed_config", str(path)], {})
    assert settings.protect == SnapshotConfig().protect
    assert "inmem_snapshot.enabled is not true" in capsys.readouterr().err


def test_other_commands_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("no JSON")
    (tmp_path / "broken.json").write_text("{")
    for words in (
        [],
        ["--deepspeed"],
        ["--deepspeed", "--fp16"],
        ["--deepspeed", str(tmp_path / "corpus.txt")],
        ["--deepspeed_config", str(tmp_path / "missing.json")],
    ):
        assert read_command(words) is None
    with pytest.raises(ConfigError, match=r"broken\.json cannot be read as JSON"):
        read_command(["--deepspeed_config", str(tmp_path / "broken.json")])


def test_a_trainer_refuses_what_the_supervisor_was_told_otherwise() -> None:
    section = read_section({"inmem_snapshot": {"enabled": True, "protect": "xor:2"}})
    assert section is not None
    environment = {"MEGATRON_FT_JOB": "job", "MEGATRON_FT_PROTECT": "rs:3+1"}
    (line,) = job_contradictions(section.source, "reads no scripts", environment)
    assert "inmem_snapshot.protect is xor:2" in line and "supervisor's --protect is rs:3+1" in line
    assert job_contradictions(section.source, "", {"MEGATRON_FT_PROTECT": "rs:3+1"}) == []
