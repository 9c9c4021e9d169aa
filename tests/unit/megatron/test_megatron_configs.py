"""configs/megatron: each file is what it says, for Megatron's parser, for ours, and for stripes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.cli import run
from megatron_ft.cli.training_command import command_of, settle
from megatron_ft.config.flags import read_command
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import RankPlace, plan_stripes
from megatron_ft.megatron.fewer_ranks import arguments_of, refusals, rule_of
from megatron_ft.supervisor.slot_choice import USUAL
from tests.support.warm_host import WarmHost

FOLDER = Path(__file__).parents[3] / "configs" / "megatron"
PARAMETERS = {"gpt-125m": 125e6, "gpt-1.3b": 1.3e9, "llama-7b": 7e9, "llama-70b": 70e9}
CHANGES = {
    "experts": "--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    "pipeline": "--pipeline-model-parallel-size=2 --micro-batch-size 2",
}
"""Further flags of gpt-125m."""
_PRINT = 'source "$1"; printf "%s\\0" "$NODES" "$GPUS_PER_NODE" "${MEGATRON_ARGS[@]}"'


@dataclass(frozen=True)
class Launch:
    """What a shell that sources a file has."""

    nodes: int
    gpus: int
    flags: list[str]


def source(name: str, **variables: str) -> Launch:
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        ["bash", "-euc", _PRINT, "bash", str(FOLDER / f"{name}.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    nodes, gpus, *flags = done.stdout.split("\0")[:-1]
    return Launch(int(nodes), int(gpus), flags)


def changed(name: str) -> Launch:
    launch = source("gpt-125m")
    return replace(launch, flags=[*launch.flags, *CHANGES[name].split()])


def parameter_count(args: Mapping[str, Any]) -> int:
    """Parameters of a dense GPT, from Megatron's checked arguments."""
    hidden, layers, ffn = args["hidden_size"], args["num_layers"], args["ffn_hidden_size"]
    heads = args["num_attention_heads"] * args["kv_channels"]
    # Megatron's number of query groups is 1 where grouping is off.
    grouped = args["group_query_attention"]
    keys = args["num_query_groups"] * args["kv_channels"] if grouped else heads
    unit = args["make_vocab_size_divisible_by"] * args["tensor_model_parallel_size"]
    vocabulary = -(-args["vocab_size"] // unit) * unit
    norm = hidden * (1 if args["normalization"] == "RMSNorm" else 2)
    biases = heads + 2 * keys + hidden + ffn + hidden if args["add_bias_linear"] else 0
    weights = hidden * (2 * heads + 2 * keys) + (3 if args["swiglu"] else 2) * hidden * ffn
    embeddings = vocabulary * (2 if args["untie_embeddings_and_output_weights"] else 1)
    if args["position_embedding_type"] == "learned_absolute":
        embeddings += args["max_position_embeddings"]
    return int(layers * (weights + biases + 2 * norm) + norm + embeddings * hidden)


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.sh")} == {*PARAMETERS, "storage"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_supervisor_reads_the_flags(name: str) -> None:
    launch = source(name)
    assert read_command(launch.flags).enabled
    settings = settle({}, ["python", "pretrain_gpt.py", *launch.flags], {})
    assert settings.protect != "none" and settings.checkpoint_dir is settings.drain_dir is None
    folders = source(name, CHECKPOINT_DIR="/my files/c", DRAIN_DIR="/d").flags
    assert folders[folders.index("--save") + 1] == "/my files/c"
    settings = settle({}, folders, {})
    assert (str(settings.checkpoint_dir), str(settings.drain_dir)) == ("/my files/c", "/d")
    assert settings.drain_interval > 0


SCRIPT = FOLDER.parents[1] / "scripts" / "slurm" / "pretrain_gpt_inmem.sbatch"
_FAKE = '#!/bin/bash\n[[ "$0" == */megatron-ft ]] && printf "%s\\0" "$@" > "$ARGUMENTS"\nexit 0\n'
"""Stands for Slurm's commands, and writes down what the batch script gives to ours."""


def submit(folder: Path, config: Path, nodes: int, **variables: str) -> tuple[str, list[str]]:
    """Run the batch script as Slurm does; its errors, and the arguments of ``megatron-ft``."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("megatron-ft", "srun", "scontrol", "squeue", "scancel"):
        (programs / name).write_text(_FAKE)
        (programs / name).chmod(0o755)
    written = folder / "arguments"
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "VENV": str(programs.parent),
        "MEGATRON_FT_HOME": str(FOLDER.parents[1]), "MEGATRON_LM": "/m",
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NAME": "j", "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURMD_NODENAME": "a", "ARGUMENTS": str(written),
        "DEPUTY_SECONDS": "1", "CONFIG": str(config), "DATA_ARGS": "--data-path /d", **variables,
    }  # fmt: skip
    with (folder / "errors").open("w") as errors:  # no pipe: a sleep of its own outlives the script
        subprocess.run(
            ["bash", str(SCRIPT)],
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            timeout=60,
        )
    problems = (folder / "errors").read_text()
    return problems, written.read_text().split("\0")[:-1] if written.exists() else []


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("drains", ["", "/d"])
def test_the_batch_script_takes_the_file(name: str, drains: str, tmp_path: Path) -> None:
    launch = source(name)
    config, nodes = FOLDER / f"{name}.sh", launch.nodes + 1
    variables = {"DRAIN_DIR": drains} if drains else {}
    problems, given = submit(tmp_path, config, nodes, **variables)
    assert given[:2] == ["run", "--launcher"], problems
    parser = argparse.ArgumentParser(allow_abbrev=False)
    run.add_arguments(parser)
    arguments = parser.parse_args(given[1:])
    command = command_of(arguments)
    settings = settle(vars(arguments), command, {})
    assert settings.protect == settle({}, launch.flags, {}).protect
    assert (settings.drain_dir is not None) and settings.drain_interval > 0
    assert (arguments.spares, arguments.ranks_per_node) == (1, launch.gpus)
    assert command[:2] == ["python", "/m/pretrain_gpt.py"] and command[-1] == "/d"


def test_the_batch_script_says_how_many_nodes_the_file_needs(tmp_path: Path) -> None:
    problems, given = submit(tmp_path, FOLDER / "llama-7b.sh", 5)
    assert "submit it with sbatch --nodes=9" in problems and not given


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_stripe_is_full_and_of_equal_shards(name: str) -> None:
    launch = source(name)
    scheme = Scheme.parse(settle({}, launch.flags, {}).protect)
    given = dict(zip(launch.flags, launch.flags[1:], strict=False))
    tp = int(given["--tensor-model-parallel-size"])
    pp = int(given["--pipeline-model-parallel-size"])
    world = launch.nodes * launch.gpus
    data_parallel = world // tp // pp
    coordinates = {}
    places = []
    for rank in range(world):  # Megatron's order: tensor, then data, then pipeline
        stage, rest = divmod(rank, tp * data_parallel)
        shard, node = f"rank{rank}", f"node{rank // launch.gpus}"
        coordinates[shard] = (stage, rest % tp)
        local = rank % launch.gpus
        places.append(RankPlace(rank, shard, node, node, local, coordinates[shard], 1))
    for stripe in plan_stripes(places, scheme):
        assert (stripe.data_members, stripe.parity_members) == (
            scheme.data_members,
            scheme.parity_members,
        )
        assert len(set(stripe.nodes)) == scheme.members
        assert len({coordinates[member] for member in stripe.members}) == 1


@pytest.fixture(scope="module")
def parsed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """All files through Megatron's parser and checks."""
    if find_spec("megatron") is None or find_spec("megatron.training") is None:
        pytest.skip("needs megatron-core with megatron.training")
    folder = tmp_path_factory.mktemp("parsed")
    launches = {name: source(name).__dict__ for name in PARAMETERS}
    launches |= {name: changed(name).__dict__ for name in CHANGES}
    given, target = folder / "launches", folder / "parsed"
    given.write_text(json.dumps(launches))
    host: WarmHost = request.getfixturevalue("megatron_server")
    host.call("tests.programs.megatron_flags:parse", folder, str(given), str(target))
    found: dict[str, dict[str, Any]] = json.loads(target.read_text())
    return found


@pytest.mark.megatron
@pytest.mark.parametrize("name", [*PARAMETERS, *CHANGES])
def test_numbers_of_ranks_follow_from_the_flags_alone(
    name: str, parsed: dict[str, dict[str, Any]]
) -> None:
    """The doctor reads them without Megatron."""
    args = arguments_of(changed(name).flags if name in CHANGES else source(name).flags)
    assert args is not None and not refusals(args)
    assert rule_of(args) == rule_of(SimpleNamespace(**parsed[name]))


@pytest.mark.megatron
@pytest.mark.parametrize("name", PARAMETERS)
def test_megatron_accepts_the_flags(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    args = parsed[name]
    assert args["inmem_snapshot"] is True
    text = (FOLDER / f"{name}.sh").read_text()
    assert f"# Data-parallel size {args['data_parallel_size']}.\n" in text
    tokens = args["global_batch_size"] * args["seq_length"]
    total = tokens * args["train_iters"]
    assert f"# {tokens / 1e6:.1f} million tokens an iteration, {total / 1e12:.1f} trillion" in text


@pytest.mark.megatron
@pytest.mark.parametrize("name", PARAMETERS)
def test_size_and_memory_are_as_the_file_says(name: str, parsed: dict[str, dict[str, Any]]) -> None:
    count = parameter_count(parsed[name])
    assert abs(count / PARAMETERS[name] - 1) < 0.05
    text = (FOLDER / f"{name}.sh").read_text()
    found = re.search(
        r"12 B x ([\d.e]+) parameters / (\d+) nodes x (\d) slots "
        r"x \(1 \+ (\d)/(\d)\) = ([\d.]+) GiB",
        text,
    )
    assert found is not None, "the file does not say what snapshots cost"
    said, nodes, slots, parity, data, gib = map(float, found.groups())
    launch = source(name)
    settings = settle({}, launch.flags, {})
    scheme = Scheme.parse(settings.protect)
    assert (nodes, slots) == (launch.nodes, settings.fixed_slots or USUAL)
    assert (data, parity) == (scheme.data_members, scheme.parity_members)
    assert abs(said / count - 1) < 0.001
    assert abs(12 * count / nodes * slots * (1 + parity / data) / 2**30 - gib) < 0.1
    row = f"| `{name}.sh` | {launch.nodes} | .* | `{re.escape(str(scheme))}` | {gib} GiB |"
    page = (FOLDER.parents[1] / "docs" / "how-to" / "megatron.md").read_text()
    assert re.search(row.replace("|", r"\|"), page), "docs/how-to/megatron.md says something else"
