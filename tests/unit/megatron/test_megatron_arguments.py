"""Flags made from SnapshotConfig, and the settings that they refuse."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ft.config import SETTINGS, SnapshotConfig
from megatron_ft.core import environment
from megatron_ft.core.errors import ConfigError
from megatron_ft.megatron import arguments, hooks
from tests.support.warm_host import WarmHost


def parse(*flags: str) -> argparse.Namespace:
    parser = arguments.add_snapshot_arguments(argparse.ArgumentParser())
    return parser.parse_args(flags)


def test_every_setting_has_a_flag_with_its_help_in_one_group() -> None:
    text = arguments.add_snapshot_arguments(argparse.ArgumentParser()).format_help()
    group = text[text.index(arguments.GROUP_TITLE) :]
    assert "--inmem-snapshot " in group
    for setting in SETTINGS.values():
        assert f"{setting.flag} " in group
        shown = f"default: {setting.shown_default}"
        assert setting.default is None or shown in " ".join(group.split())


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
    assert config.slots == SnapshotConfig().slots


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="--inmem-snapshot-interval is 0"):
        arguments.validate(parse("--inmem-snapshot-interval", "0"))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"optimizer": "lion"}, "--optimizer"),
        ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, "--muon-scalar-optimizer"),
        ({"optimizer_cuda_graph": True}, "--optimizer-cuda-graph"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"fp4_param_gather": True}, "--fp4-param-gather"),
        ({"fp8_param_gather": True}, "--fp8-param-gather.* stay in 16 bits"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp.* --use-distributed-optimizer instead"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards"),
        ({"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards"),
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
    ordinary.gtp_weight_remat_size = ordinary.expert_gtp_weight_remat_size = 1
    assert arguments.validate(ordinary) == SnapshotConfig()
    layer_wise = SimpleNamespace(optimizer="muon", use_layer_wise_distributed_optimizer=True)
    layer_wise.muon_scalar_optimizer, layer_wise.async_save = "adam", True
    assert arguments.validate(layer_wise) == SnapshotConfig()


def test_conflicts_bad_values_and_contradictions_come_in_one_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_FT_JOB", "job")
    monkeypatch.setenv("MEGATRON_FT_PROTECT", "rs:3+1")
    args = parse("--inmem-snapshot", "--inmem-protect", "xor:4")
    args.qk_clip = True
    args.inmem_snapshot_interval = 0
    with pytest.raises(ConfigError) as caught:
        arguments.check(args, [])
    assert "--qk-clip" in str(caught.value)
    assert "--inmem-snapshot-interval is 0" in str(caught.value)
    args.inmem_snapshot_interval = 2
    with pytest.raises(ConfigError) as caught:
        arguments.check(args, [])
    assert "--qk-clip" in str(caught.value)
    assert "--inmem-protect is xor:4, but the supervisor's --protect is rs:3+1" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "variables", "refused"),
    [
        (["--inmem-protect", "xor:4"], {"MEGATRON_FT_PROTECT": "xor:4"}, False),
        (["--inmem-protect", "xor:04"], {"MEGATRON_FT_PROTECT": "xor:4"}, False),
        (["--inmem-drain-dir", "/x"], {"MEGATRON_FT_DRAIN_DIR": ""}, True),
        (["--inmem-slots", "3"], {"MEGATRON_FT_SLOTS": "2"}, True),
        (["--inmem-slots", "3"], {}, False),  # a supervisor that tells nothing
        ([], {"MEGATRON_FT_SLOTS": "3"}, False),
        (["--inmem-snapshot-interval", "9"], {"MEGATRON_FT_SNAPSHOT_INTERVAL": "3"}, False),
    ],
)
def test_a_setting_of_the_job_must_be_what_the_supervisor_uses(
    flags: list[str], variables: dict[str, str], refused: bool
) -> None:
    args = parse("--inmem-snapshot", *flags)
    assert arguments.contradictions(args, variables) == []  # no supervisor, nothing to contradict
    found = arguments.contradictions(args, {"MEGATRON_FT_JOB": "job", **variables})
    assert [flags[0] in line for line in found] == [True] * refused


def test_flags_beside_a_yaml_file_are_not_silently_lost() -> None:
    args = SimpleNamespace(yaml_cfg="gpt.yaml", inmem_snapshot=True)
    with pytest.raises(ConfigError, match="`inmem_slots` into gpt.yaml"):
        arguments.check(args, ["--yaml-cfg", "gpt.yaml", "--inmem-slots=3"])
    arguments.check(args, ["--yaml-cfg", "gpt.yaml"])
    args.inmem_slot = 3
    with pytest.raises(ConfigError, match="unknown setting inmem_slot; did you mean inmem_slots"):
        arguments.check(args, [])


def test_parsed_values_are_plain_types_that_a_checkpoint_can_hold() -> None:
    args = parse("--inmem-drain-dir", "/x", "--inmem-protect=xor:4", "--inmem-slots=3")
    assert {type(value) for value in vars(args).values()} <= {str, int, float, bool, type(None)}


def test_training_without_snapshots_under_a_supervisor_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be ended after minutes, because none of its ranks registers."""
    begun: list[object] = []
    train = hooks._with_end(lambda train_data_iterator: begun.append(train_data_iterator))
    monkeypatch.setenv(environment.RESTORE, "memory")
    with pytest.raises(ConfigError, match="add --inmem-snapshot to its flags"):
        train(1)
    assert not begun
    # As an uninterrupted run of the same command, which nobody supervises.
    monkeypatch.delenv(environment.RESTORE)
    monkeypatch.setenv(environment.JOB, "oracle")
    train(2)
    assert begun == [2]


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)
def test_conflicts_are_refused_where_megatron_validates_its_arguments(
    megatron_server: WarmHost, tmp_path: Path
) -> None:
    megatron_server.call("tests.programs.megatron_flags:refuse_conflicts", tmp_path)
