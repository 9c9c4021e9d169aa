"""The start of a job by what the machine has: the number of slots, room, descriptors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.config import SnapshotConfig
from megatron_ft.core.errors import ConfigError, ControlPlaneError
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.fleet import Fleet
from megatron_ft.supervisor.orders import bytes_by_node, create_requests
from megatron_ft.supervisor.slot_choice import choose_slots, too_small
from megatron_ft.supervisor.spec import JobSpec
from tests.support.smp_node import SmpNode

STRIPES = (StripeState("xor", 1, 1, 1 << 20, ("dp0", "dp1"), 4096),)
PLACES = {"dp0": "n0", "dp1": "n1"}
FOUR = bytes_by_node(create_requests(STRIPES, 1, (), 4), PLACES)["n0"]
"""Bytes of a node's arena of four slots."""


class Nodes:
    """Answers with the memory of each node; one that is missing refuses."""

    incarnation = 1

    def __init__(self, rooms: Mapping[str, m.Room]) -> None:
        self.rooms, self.asked = rooms, 0

    async def ask_all(self, requests: Mapping[str, m.Message]) -> dict[str, m.Room]:
        """Stands for Fleet.ask_all."""
        self.asked += 1
        if away := requests.keys() - self.rooms.keys():
            raise ControlPlaneError(f"no answer of {away}")
        return {node: self.rooms[node] for node in requests}


def room(available: int, machine: str) -> m.Room:
    return m.Room(available, "the tmpfs", machine)


def chosen(nodes: Nodes, **settings: Any) -> tuple[int, str]:
    spec = JobSpec(name="job", command=("x",), nodes=2, settings=SnapshotConfig(**settings))
    work = choose_slots(cast(Fleet, nodes), spec, STRIPES, PLACES, ["n2"])
    choice = asyncio.run(work)
    return choice.count, choice.reason


def drained(**more: Any) -> dict[str, Any]:
    return {"drain_dir": Path("/disk"), "drain_interval": 10, "protect": "xor:2", **more}


@pytest.mark.parametrize(
    ("bytes_of", "count", "node"),
    [
        ((FOUR, FOUR, FOUR), 3, ""),
        ((FOUR, FOUR - 1, FOUR), 2, "n1"),
        ((FOUR, FOUR, FOUR - 1), 2, "n2"),  # a spare
        ((FOUR, -5, FOUR), 2, "n1"),
    ],
)
def test_every_node_and_spare_must_have_the_memory(
    bytes_of: tuple[int, int, int], count: int, node: str
) -> None:
    nodes = Nodes({f"n{i}": room(size, f"m{i}") for i, size in enumerate(bytes_of)})
    found, reason = chosen(nodes, **drained())
    assert found == count
    assert not node or (f"with that {node} needs" in reason and "the tmpfs leaves" in reason)


def test_what_is_given_counts_and_nobody_is_asked() -> None:
    nodes = Nodes({})
    assert chosen(nodes, **drained(slots=2))[0] == 2
    assert chosen(nodes, **drained(slots=3))[0] == 3
    assert chosen(nodes, protect="xor:2")[0] == 2, "no drain reads a slot"
    assert not nodes.asked
    with pytest.raises(ConfigError, match="slots is 4; give 2, 3 or auto"):
        chosen(nodes, slots=4)


def test_a_node_that_cannot_say_costs_the_third_slot() -> None:
    count, reason = chosen(Nodes({"n0": room(FOUR, "m")}), **drained())
    assert count == 2 and "the free memory is not known" in reason


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 9), min_size=1), st.data())
def test_nodes_of_one_machine_share_its_memory(needs: dict[str, int], data: st.DataObject) -> None:
    """Whichever node takes a place, no machine is asked for more than it has."""
    machines = data.draw(st.fixed_dictionaries(dict.fromkeys("abcd", st.sampled_from("xy"))))
    memory = data.draw(st.fixed_dictionaries(dict.fromkeys("xy", st.integers(0, 30))))
    rooms = {node: room(memory[machine], machine) for node, machine in machines.items()}
    fits = all(
        memory[machines[node]]
        >= max(max(needs.values()), sum(n for o, n in needs.items() if machines[o] == at))
        for node, at in machines.items()
    )
    assert bool(too_small(needs, rooms)) is not fits


TIMEOUT = 60.0


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "full"
    mounted.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(mounted)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("cannot mount a tmpfs: needs root and the right to mount")
    try:
        (mounted / "fill").write_bytes(bytes(64 << 10))
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def test_an_smp_on_a_full_tmpfs_names_the_folder_and_what_it_needs(full_tmpfs: Path) -> None:
    node = SmpNode(full_tmpfs)
    node.log = full_tmpfs.with_name("log")
    node.start()
    assert node.process is not None and node.process.wait(TIMEOUT) == 1
    said = node.log.read_text()
    assert f"{full_tmpfs}" in said and "Traceback" not in said
    assert "is full" in said and "0 bytes of 64.00 KiB" in said
    assert "a node needs, besides its arenas, 64.00 KiB" in said


def test_a_soft_limit_of_descriptors_is_raised_for_all_children() -> None:
    program = "from megatron_ft.supervisor.spec import raise_open_files; import os; "
    program += "raise_open_files(); os.system('ulimit -Sn')"
    script = 'ulimit -Sn 40; ulimit -Hn 69; exec "$0" -c "$1"'
    said = subprocess.check_output(["sh", "-c", script, sys.executable, program], timeout=TIMEOUT)
    assert said == b"69\n"
