"""Flags made from SnapshotConfig, and the settings that they refuse."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from megatron_ft.config import SnapshotConfig  # noqa: E402
from megatron_ft.errors import ConfigError  # noqa: E402
from megatron_ft.megatron import arguments  # noqa: E402


def parse(*flags: str) -> argparse.Namespace:
    parser = arguments.add_snapshot_arguments(argparse.ArgumentParser())
    return parser.parse_args(flags)


def test_every_setting_has_a_flag_with_its_help_in_one_group() -> None:
    text = arguments.add_snapshot_arguments(argparse.ArgumentParser()).format_help()
    group = text[text.index(arguments.GROUP_TITLE) :]
    assert "--inmem-snapshot " in group
    for field in dataclasses.fields(SnapshotConfig):
        assert arguments.flag_of(field.name) in group
        assert f"Default: {field.default}" in " ".join(group.split())


def test_adding_flags_twice_changes_nothing() -> None:
    once = arguments.add_snapshot_arguments(argparse.ArgumentParser())
    before = once.format_help()
    assert arguments.add_snapshot_arguments(once).format_help() == before


def test_no_flag_means_no_snapshots() -> None:
    assert not arguments.is_enabled(parse())
    assert not arguments.is_enabled(SimpleNamespace())  # a YAML file that knows no such key


def test_the_switch_is_not_an_abbreviation_of_the_interval() -> None:
    args = parse("--inmem-snapshot")
    assert arguments.is_enabled(args)
    assert arguments.config_from_args(args) == SnapshotConfig()


def test_a_flag_wins_over_the_environment_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_FT_SNAPSHOT_INTERVAL", "7")
    monkeypatch.setenv("MEGATRON_FT_FENCE_TIMEOUT_SECONDS", "3")
    config = arguments.config_from_args(parse("--inmem-snapshot-interval", "5"))
    assert (config.snapshot_interval, config.fence_timeout_seconds) == (5, 3.0)
    assert config.copy_piece_bytes == SnapshotConfig().copy_piece_bytes


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="snapshot_interval is 0"):
        arguments.validate(parse("--inmem-snapshot-interval", "0"))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"optimizer": "lion"}, "--optimizer"),
        ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"fp4_param_gather": True}, "--fp4-param-gather"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"skip_train": True}, "--skip-train"),
        ({"inprocess_restart": True}, "--inprocess-restart"),
    ],
)
def test_what_cannot_be_restored_exactly_is_refused_by_name(
    setting: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        arguments.validate(SimpleNamespace(**setting))


def test_all_conflicts_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        arguments.validate(SimpleNamespace(qk_clip=True, skip_train=True))
    assert "--qk-clip" in str(caught.value) and "--skip-train" in str(caught.value)


def test_ordinary_settings_are_accepted() -> None:
    ordinary = SimpleNamespace(optimizer="sgd", dataloader_type="external", fp8_recipe="delayed")
    assert arguments.validate(ordinary) == SnapshotConfig()
