"""Settings: their sources, which of them counts, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import SETTINGS, SnapshotConfig, Source, differences, resolve
from megatron_ft.core import environment
from megatron_ft.core.errors import ConfigError

VALID: dict[str, st.SearchStrategy[object]] = {
    "snapshot_interval": st.integers(1, 10**6),
    "protect": st.sampled_from(["none", "xor:4", "rs:3+1", "rs:6+2", "replica:2"]),
    "slots": st.sampled_from([2, 3]),
    "drain_dir": st.sampled_from(["/data/drain", "relative/drain"]),
    "drain_interval": st.integers(1, 10**6),
    "drain_minutes": st.floats(0, 10**4),
    "drain_bandwidth_mib": st.floats(0, 1e6),
    "drain_export_dir": st.sampled_from(["/data/exports", "relative/exports"]),
    "lease_seconds": st.floats(0.01, 1e6),
}
# Always given, as no setting of a drain does anything without them.
DRAIN = {name: VALID.pop(name) for name in ("drain_dir", "drain_interval")}
some_values = st.fixed_dictionaries(DRAIN, optional=VALID)


def from_mapping(values: Mapping[str, object]) -> SnapshotConfig:
    return resolve(Source(values, str))


def test_no_two_names_mean_the_same_variable() -> None:
    ours = [setting.variable for setting in SETTINGS.values()]
    theirs = [environment.JOB, environment.NODE, environment.NODE_DIR]
    theirs += [environment.INCARNATION, environment.RESTORE]
    assert len({*ours, *theirs}) == len(ours) + len(theirs)


def test_every_default_is_a_value_that_is_allowed() -> None:
    for name, setting in SETTINGS.items():
        if setting.default is not None:
            assert setting.parse(str(setting.default), name) == setting.default


@given(some_values)
def test_numbers_and_their_text_are_the_same_setting(values: dict[str, object]) -> None:
    text = {name: str(value) for name, value in values.items()}
    assert from_mapping(text) == from_mapping(values)


@given(some_values)
def test_what_trainers_are_told_is_what_the_supervisor_uses(values: dict[str, object]) -> None:
    chosen = from_mapping(values)
    told = SnapshotConfig.from_env(chosen.job_variables())
    for name, setting in SETTINGS.items():
        expected = getattr(chosen, name) if setting.job else setting.default
        assert getattr(told, name) == expected


@given(some_values, some_values)
def test_the_first_source_that_gives_a_value_counts(
    first: dict[str, object], second: dict[str, object]
) -> None:
    both = resolve(Source(first, str), Source(second, str))
    assert both == from_mapping({**second, **first})


@given(some_values, some_values)
def test_differences_are_between_what_both_give(
    ours: dict[str, object], theirs: dict[str, object]
) -> None:
    found = differences(Source(ours, str), Source(theirs, str))
    mine, other = from_mapping(ours), from_mapping(theirs)
    both = ours.keys() & theirs.keys()
    assert found.keys() == {n for n in both if getattr(mine, n) != getattr(other, n)}


def test_a_folder_is_the_same_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"drain_dir": "drain", "drain_interval": 5}
    told = from_mapping(given).job_variables()
    monkeypatch.chdir("/")
    assert SnapshotConfig.from_env(told).drain_dir == tmp_path / "drain"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("snapshot_interval", 0, "snapshot_interval is 0; give a whole number >= 1"),
        ("snapshot_interval", "2.5", "snapshot_interval is '2.5'"),
        ("snapshot_interval", 2.5, "snapshot_interval is 2.5"),
        ("snapshot_interval", True, "snapshot_interval is True"),
        ("slots", 4, "slots is 4; give 2, 3 or auto"),
        ("protect", "raid5", "protect is raid5: unknown redundancy scheme 'raid5'; write xor:N"),
        ("protect", "xor:1", "protect is xor:1: redundancy scheme xor:1: it needs at least"),
        ("fence_timeout_seconds", "nan", "fence_timeout_seconds is 'nan'; give seconds > 0"),
        ("fence_timeout_seconds", float("inf"), "give seconds > 0"),
        ("drain_keep", 5, "drain_keep is 5, but there is no drain_dir"),
        ("drain_dir", "/d", "drain_dir is /d, but drain_interval is 0: nothing is written"),
        ("drain_dir", "/data/\udcff", "drain_dir is /data/\udcff: a folder's name must be UTF-8"),
        ("drain_dir", "/data/\0", "a folder's name must be UTF-8, without NUL"),
        ("drain_dir", "~nobody-of-this-name/x", "its ~ names no user of this machine"),
        ("snapshot_intervall", 5, "did you mean snapshot_interval?"),
    ],
)
def test_a_bad_value_is_said_with_what_to_give(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({name: value})
    assert said in str(caught.value)


def test_all_bad_values_are_listed_at_once_with_their_places() -> None:
    variables = {"MEGATRON_FT_SLOTS": "9", "MEGATRON_FT_LEASE_SECONDS": "soon"}
    with pytest.raises(ConfigError) as caught:
        SnapshotConfig.from_env(variables)
    assert "MEGATRON_FT_SLOTS is 9" in str(caught.value)
    assert "MEGATRON_FT_LEASE_SECONDS is 'soon'" in str(caught.value)


def test_a_config_that_is_made_directly_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="drain_keep is 0"):
        SnapshotConfig(drain_keep=0)
    assert dataclasses.replace(SnapshotConfig(), protect="xor:04").protect == "xor:4"


def test_empty_variables_count_as_not_set() -> None:
    assert SnapshotConfig.from_env({"MEGATRON_FT_SNAPSHOT_INTERVAL": ""}) == SnapshotConfig()
