"""Naming the slow or broken node: forged matrices of rates, and a real world with one fault."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cli.doctor.facts import WorldFacts
from megatron_ft.cli.doctor.pair_world import round_robin
from megatron_ft.cli.doctor.pairs import (
    SLOW_NODE,
    Pair,
    Worlds,
    all_pairs,
    first_groups,
    judge_pairs,
    merged,
    mixed_groups,
    never_well,
    second_round,
)
from megatron_ft.erasure.world import MPI, TCP
from megatron_ft.launchers.launcher import Placement
from megatron_ft.launchers.process import LocalProcess
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.launchers.world import WorldProcess
from tests.support.erasure_world import BOTH

NODES = [f"n{i:02d}" for i in range(12)]


@given(st.integers(1, 33))
def test_everybody_meets_everybody_once(count: int) -> None:
    rounds = round_robin(count)
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert met == Counter((a, b) for a in range(count) for b in range(a + 1, count))
    for pairs in rounds:
        assert len({i for pair in pairs for i in pair}) == 2 * len(pairs)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[str], dict[Pair, float], set[str], set[str]]:
    """Noisy rates with slow and broken nodes in them, fewer than half."""
    nodes = NODES[: draw(st.integers(3, 12))]
    faulty = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=(len(nodes) - 1) // 2))
    cut = draw(st.integers(0, len(faulty)))
    slow, broken = set(faulty[:cut]), set(faulty[cut:])
    rates = {}
    for pair in all_pairs(nodes):
        factor = 0.0 if broken & {*pair} else 0.3 if slow & {*pair} else 1.0
        rates[pair] = 1e9 * factor * draw(st.floats(0.8, 1.2))
    return nodes, rates, slow, broken


@settings(max_examples=60)
@given(matrices())
def test_exactly_the_faulty_nodes_are_named(
    case: tuple[list[str], dict[Pair, float], set[str], set[str]],
) -> None:
    nodes, rates, slow, broken = case
    verdict = judge_pairs(nodes, rates)
    assert set(verdict.slow) == slow and set(verdict.broken) == broken
    assert not verdict.slow_links and not verdict.broken_links
    assert verdict.suspects == slow | broken
    again = second_round(nodes, verdict)
    measured = {nodes[i] for pairs in again for pair in pairs for i in pair}
    assert measured == (set(nodes) - broken if slow else set())
    assert all(len(pairs) == 1 for pairs in again)


@given(st.integers(3, 8), st.data())
def test_a_link_between_good_nodes_is_named_as_a_link(count: int, data: st.DataObject) -> None:
    nodes = NODES[:count]
    pair = data.draw(st.sampled_from(all_pairs(nodes)))
    even = dict.fromkeys(all_pairs(nodes), 1e9)
    verdict = judge_pairs(nodes, even | {pair: 1e8})
    if count > 3:
        assert dict(verdict.slow_links) == {pair: 0.1} and not verdict.slow
        assert not judge_pairs(nodes, even | {pair: 1e8}, one_machine=True).suspects
    assert judge_pairs(nodes, even | {pair: 0.0}).broken_links == (pair,)


def test_what_was_disturbed_once_is_cleared_by_the_second_round() -> None:
    nodes = NODES[:4]
    first = dict.fromkeys(all_pairs(nodes), 1e9) | {p: 1e8 for p in all_pairs(nodes) if "n02" in p}
    assert set(judge_pairs(nodes, first).slow) == {"n02"}
    again = {("n00", "n02"): 9e8, ("n01", "n02"): 1e6}
    both = merged(first, again, {"n02"})
    assert ("n02", "n03") not in both and both["n01", "n02"] == 1e8
    assert set(judge_pairs(nodes, both).slow_links) == {("n01", "n02")}
    del again["n01", "n02"]
    assert not judge_pairs(nodes, merged(first, again, {"n02"})).suspects
    # Silence is kept, whoever was asked again.
    assert merged({("a", "b"): 0.0}, {}, {"a"}) == {("a", "b"): 0.0}
    # One of another machine may be slower without being slow on this one.
    assert SLOW_NODE > 0.3
    assert not judge_pairs(nodes, merged(first, {p: 3e8 for p in first}, {"n02"}), True).slow


def test_of_two_nodes_none_is_named() -> None:
    assert not judge_pairs(["a", "b"], {("a", "b"): 1e6}).suspects
    assert judge_pairs(["a", "b"], {("a", "b"): 0.0}).broken_links == (("a", "b"),)


@given(st.integers(1, 12), st.data())
def test_groups_of_a_world_that_does_not_start_name_the_broken(
    count: int, data: st.DataObject
) -> None:
    nodes = NODES[:count]
    broken = set(data.draw(st.lists(st.sampled_from(nodes), unique=True)))

    def runs(group: Sequence[str]) -> bool:
        return not broken & {*group}

    first = {group: runs(group) for group in first_groups(nodes)}
    assert Counter(n for group in first for n in group) == Counter(nodes)
    mixed = [(group, runs(group)) for group in mixed_groups(first)]
    assert never_well([*first.items(), *mixed]) == tuple(sorted(broken))


class OneRankFails(VirtualCluster):
    """A cluster on whose last node no rank of a world comes up."""

    def start_world(self, placements: Sequence[Placement], log_path: Path) -> WorldProcess:
        last = self.nodes()[-1]
        changed = [p._replace(argv=["false"]) if p.node == last else p for p in placements]
        return super().start_world(changed, log_path)

    def start(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        stdin: bytes | None = None,
    ) -> LocalProcess:
        argv = ["false"] if node == self.nodes()[-1] else argv
        return super().start(node, argv, env, log_path, stdin)


def examined(
    folder: Path, count: int, transport: str, kind: type[VirtualCluster] = VirtualCluster
) -> WorldFacts:
    cluster = kind(f"doctor-{uuid.uuid4().hex[:8]}", NODES[:count])
    worlds = Worlds(cluster, folder, ".none", transport)
    try:
        return asyncio.run(worlds.examine(NODES[:count], True))
    finally:
        cluster.destroy()


@BOTH
def test_a_real_world_measures_every_pair(transport: str, tmp_path: Path) -> None:
    found = examined(tmp_path, 4, transport)
    assert not found.error and set(found.joined) == set(NODES[:4])
    assert set(found.rates) == set(all_pairs(NODES[:4])) and all(found.rates.values())
    assert found.tcp == (transport == TCP) and not found.no_mpi
    assert ("MPI" in found.launcher) == (transport == MPI)
    name = "MPI" if transport == MPI else "TCP with CURVE"
    assert all(name in rank.library for rank in found.joined.values())


@BOTH
def test_a_node_whose_rank_does_not_come_up_is_named(transport: str, tmp_path: Path) -> None:
    found = examined(tmp_path, 3, transport, OneRankFails)
    assert found.error and found.broken == ("n02",)


@pytest.fixture
def without_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('libmpi.so not found')")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("without_mpi")
def test_without_mpi_tcp_is_used_and_said(tmp_path: Path) -> None:
    found = examined(tmp_path, 2, "auto")
    assert not found.error and found.tcp and "libmpi.so not found" in found.no_mpi
    assert all(found.rates.values()) and set(found.joined) == {"n00", "n01"}


@pytest.mark.usefixtures("without_mpi")
def test_without_the_mpi_that_was_asked_for_every_node_is_named(tmp_path: Path) -> None:
    found = examined(tmp_path, 2, MPI)
    assert "libmpi.so not found" in found.error and found.broken == ("n00", "n01")
