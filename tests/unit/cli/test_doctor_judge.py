"""Findings from forged facts: each thing that is wrong is named, with its node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.arena.limits import MemoryReading, node_bytes
from megatron_ft.cli.doctor.checks import judge
from megatron_ft.cli.doctor.command import EXIT_CODES, shard_size
from megatron_ft.cli.doctor.facts import Facts, TrialRank
from megatron_ft.cli.doctor.node_checks import shortest_scheme
from megatron_ft.cli.doctor.report import Finding, Severity, as_json, by_node, render, worst
from megatron_ft.cli.doctor.trial_world import TrialWorlds, silent_ranks
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.transport import Transport
from megatron_ft.launchers.container import python_of
from megatron_ft.launchers.launcher import Launcher
from megatron_ft.launchers.slurm.allocation import asks_no_kill, loses_grace
from megatron_ft.supervisor.health import vote_of
from tests.support.doctor_facts import (
    GIB,
    NODES,
    PACKAGES,
    STEP,
    arena,
    asked,
    facts,
    folders,
    node,
    rank,
    trainer,
    with_node,
    with_trainer,
    world,
)

RS = Scheme.parse("rs:3+1")
RACKS = {"n0": "r0", "n1": "r0", "n2": "r0", "n3": "r1", "n4": "r1"}
OLD = PACKAGES | {"megatron-core": "0.16.9", "deepspeed": "0.18.0"}


def with_folder(name: str, **changes: object) -> Facts:
    return with_node("n2", folders=folders(name, **changes))


def with_vote(status: int | None, said: str = "") -> Facts:
    return facts(votes={**facts().votes, "n2": vote_of(status, said, 30.0)})


# What is wrong, which check says so and how, and the node that must be named ("" for none).
CASES: list[tuple[Facts, str, str, str, str]] = [
    (facts(nodes={**facts().nodes, "n2": "ssh: no route"}), "nodes", "refused", "no route", "n2"),
    (facts(job=asked(spares=(), active=NODES[:4])), "spares", "warning", "no spare", ""),
    (facts(job=asked(protect="none"), world=None), "protection", "warning",
     "", ""),
    (facts(job=asked(domains=RACKS)), "protection", "refused", "r0 holds 3 (", ""),
    (facts(no_kill=False), "slurm", "warning", "kills the job", ""),
    (facts(grace_lost=True), "slurm", "warning", "as its grace time begins", ""),
    (with_trainer("n2", cgroup=STEP.format("1")), "steps", "refused", "share the cgroup", "n2"),
    (with_trainer("n2", python="3.9.2"), "versions", "refused", "3.9.2", "n2"),
    (with_trainer("n2", packages={}), "versions", "refused", "no torch", "n2"),
    (with_trainer("n2", packages=OLD), "versions", "refused", "megatron-core 0.16.9 is too", "n2"),
    (facts(job=asked(command=("sh", "run.sh"))), "versions", "warning", "no word", ""),
    (with_node("n2", code="beef"), "same code", "refused", "beef on n2", ""),
    (with_trainer("n2", packages={**PACKAGES, "numpy": "1.0"}), "same code", "warning",
     "numpy (none on n0, n1, n3, n4; 1.0 on n2)", ""),
    (with_node("n2", arena=arena(error="Permission denied")), "arena folder", "refused", "Perm",
     "n2"),
    (with_node("n2", arena=arena(filesystem="ext4", inode=102)), "arena folder", "warning", "ext4",
     "n2"),
    (with_node("n2", arena=arena(inode=102, limits=(MemoryReading("memory.max", 200 * GIB),))),
     "memory", "refused", "memory.max leaves 200.00 GiB", "n2"),
    (facts(job=asked(shard_bytes=0)), "memory", "warning", "need not known", ""),
    (with_trainer("n2", inode=7), "same arena", "refused", "a trainer does not see", "n2"),
    (with_trainer("n2", inode=0, error="FileNotFoundError: x"), "same arena", "refused",
     "FileNotFoundError", "n2"),
    (facts(trainers={**facts().trainers, "n2": "no such image"}), "same arena", "refused",
     "no such image", "n2"),
    (facts(world=world(ranks={**world().ranks, "n2": rank("n2", inode=7)})), "same arena",
     "refused", "an encoder does not see", "n2"),
    (with_node("n2", copies="two passes", copies_advice="compile"), "copies", "warning",
     "two passes", "n2"),
    (with_trainer("n2", cores=1), "threads", "warning", "may run on 1", "n2"),
    (with_node("n2", removes_ipc=True), "RemoveIPC", "warning", "vanish", "n2"),
    (facts(world=world(ranks={**world().ranks, "n2": rank("n2", silent=(0, 3))})), "encoders",
     "refused", "no answer to n0, n3", "n2"),
    (facts(world=world(error="orted died", ranks={}, broken=("n2",))), "encoders", "refused",
     "orted died", "n2"),
    (facts(world=world(error="too many", ranks={})), "encoders", "refused",
     "halves of the nodes make worlds", ""),
    (facts(world=world(tcp=True, no_mpi="no libmpi.so")), "encoders", "warning",
     "because no MPI can be loaded: no libmpi.so", ""),
    (with_vote(1, "too hot"), "health", "warning", "it ended with 1: too hot", "n2"),
    (with_vote(126, "denied"), "health", "warning", "it ended with 126: denied", "n2"),
    (with_vote(None), "health", "warning", "it has not ended within 30 s", "n2"),
    (facts(votes=dict.fromkeys(NODES, vote_of(127, "not found", 30.0))), "health", "refused",
     "it ended with 127: not found", ""),
    (facts(job=asked(drain_dir=None)), "drain folder", "warning", "no --drain-dir", ""),
    (with_folder("/drain", error="Read-only file system"), "drain folder", "refused",
     "Read-only", "n2"),
    (with_folder("/drain", same=False), "drain folder", "refused", "another folder", "n2"),
    (facts(seen_here={"/drain": ("n0", "n1", "n3", "n4"), "/exports": NODES}), "drain folder",
     "refused", "another folder", "n2"),
    (with_folder("/drain", distrust="belongs to user 65534"), "drain folder", "refused",
     "belongs to user 65534", "n2"),
    (with_folder("/drain", free_bytes=GIB), "drain folder", "refused", "1.00 GiB free", ""),
    (with_folder("/drain", free_bytes=959 * GIB), "drain folder", "warning",
     "959.00 GiB free", ""),
    (facts(exporter="job 'other' (process 7 on x)"), "export folder", "refused",
     "--drain-export-dir /exports: job 'other' (process 7 on x) exports there", ""),
    (with_folder("/exports", error="Read-only file system"), "export folder", "refused",
     "/exports: Read-only", "n2"),
    (with_folder("/exports", same=False), "export folder", "refused", "another folder", "n2"),
]  # fmt: skip


def test_where_all_is_well_every_line_is_ok() -> None:
    findings = judge(facts())
    assert worst(findings) is Severity.OK, render(findings)
    assert {f.check for f in findings} >= {check for _, check, *_ in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}: {case[3]}")
def test_what_is_wrong_is_named(case: tuple[Facts, str, str, str, str]) -> None:
    spoiled, check, verdict, text, name = case
    bad = [f for f in judge(spoiled) if f.verdict is not Severity.OK]
    mine = [f for f in bad if f.check == check]
    assert [f.verdict.value for f in mine] == [verdict], render(bad)
    assert text in mine[0].text and mine[0].advice
    assert mine[0].nodes == ((name,) if name else ())
    # Some causes have a second consequence, in the check that follows from it.
    assert {f.check for f in bad} - {check} <= {"same code", "versions"}, render(bad)


def test_a_missing_framework_is_refused_where_it_is_used() -> None:
    bare = {"torch": "2.13.0"}
    for flags, verdict in (
        ({}, "ok"),
        ({"megatron": True}, "warning"),
        ({"deepspeed": True}, "refused"),
    ):
        given = asked(**({"megatron": False} | flags))
        spoiled = facts(job=given, trainers={n: trainer(n, packages=bare) for n in NODES})
        assert worst(f for f in judge(spoiled) if f.check == "versions").value == verdict


def test_nodes_of_one_machine_share_its_memory() -> None:
    limits = (MemoryReading("free space of /dev/shm", 900 * GIB),)
    room = arena(limits=limits)

    def memory(machine: str) -> Severity:
        nodes = {n: node(n, machine=machine or n, arena=room) for n in NODES}
        return worst(f for f in judge(facts(nodes=nodes)) if f.check == "memory")

    # 8 shards of 10 GiB, two slots, a third of parity: 213 GiB a node.
    assert (memory(""), memory("one")) == (Severity.OK, Severity.OK)
    limits = (MemoryReading("free space of /dev/shm", 800 * GIB),)
    room = arena(limits=limits)
    assert (memory(""), memory("one")) == (Severity.OK, Severity.REFUSED)


def test_the_third_slot_of_a_job_that_drains_is_judged_with_its_rest() -> None:
    """Two slots of 8 shards of 10 GiB with a third of parity take 213 GiB, four 427 GiB."""
    for left, words, severity in (
        (430, "is made", Severity.OK),
        (420, "not fit", Severity.WARNING),
    ):
        room = arena(limits=(MemoryReading("free space of /dev/shm", left * GIB),))
        nodes = {n: node(n, arena=room) for n in NODES}
        said = facts(job=asked(slots="auto"), nodes=nodes)
        (found,) = (f for f in judge(said) if f.check == "memory")
        assert found.verdict is severity and words in found.text
        (plain,) = (f for f in judge(facts(nodes=nodes)) if f.check == "memory")
        assert plain.verdict is Severity.OK and "third" not in plain.text


@given(st.integers(1, 10**9), st.integers(1, 8), st.integers(2, 3))
def test_memory_is_never_less_than_state_slots_and_parity(
    size: int, ranks: int, slots: int
) -> None:
    need = node_bytes(size, ranks, slots, RS)
    assert need >= ranks * slots * size * 4 / 3
    padded = size + RS.data_members * BLOCK_BYTES
    assert need <= ranks * (slots * padded * 4 / 3 * 1.01 + 2**20)


def test_stripes_shortened_by_domains_cost_more() -> None:
    assert shortest_scheme(NODES[:4], {}, RS) == RS
    assert shortest_scheme(NODES, {}, RS) == Scheme.parse("rs:1+1")
    pairs = {"n0": "a", "n1": "a", "n2": "b", "n3": "b"}
    assert shortest_scheme(NODES[:4], pairs, RS) == Scheme.parse("rs:1+1")


def test_the_size_of_a_shard_comes_from_the_user() -> None:
    assert shard_size(1.5, 7e9, 8) == 3 << 29
    assert shard_size(0, 7e9, 8) == 7e9 * 12 / 8
    assert shard_size(0, 0, 8) == 0


def test_what_wraps_the_trainers_python_is_kept() -> None:
    wrapped = ["apptainer", "exec", "x.sif", "/opt/bin/python3.11"]
    assert python_of([*wrapped, "train.py", "python"]) == wrapped
    assert python_of(["torchrun", "train.py"]) is None


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=5\n#SBATCH{} --requeue\nsrun --no-kill x\n"


@pytest.mark.parametrize(
    ("script", "line", "variables", "asked"),
    [(" --no-kill", "", {}, True), (" -k", "sbatch job.sh", {}, True),
     ("", "sbatch --no-kill job.sh", {}, True), ("", "sbatch job.sh", {}, False),
     ("", "", {}, False), ("", "", {"SBATCH_NO_KILL": ""}, True),
     (" --no-kill", "sbatch --no-kill=off job.sh", {}, False),
     (" --no-kill", "", {"SBATCH_NO_KILL": "off"}, False),
     (" --no-killer", "sbatch job.sh", {}, False)],
)  # fmt: skip
def test_no_kill_is_read_as_sbatch_reads_it(
    script: str, line: str, variables: dict[str, str], asked: bool
) -> None:
    assert asks_no_kill(SCRIPT.format(script), line, variables) == asked


@given(st.lists(st.sampled_from(list(Severity)), min_size=1, max_size=6))
def test_nodes_are_grouped_and_the_worst_counts(verdicts: list[Severity]) -> None:
    said = {f"n{i}": verdict for i, verdict in enumerate(verdicts)}
    judged = by_node(said, lambda verdict: Finding(verdict, f"is {verdict.value}"))
    findings = judged
    assert worst(findings) is max(verdicts, key=list(Severity).index) is findings[0].verdict
    named = [n for f in findings for n in f.nodes]
    assert sorted(named) == (sorted(said) if len(set(verdicts)) > 1 else [])
    table = as_json(findings)
    assert json.loads(json.dumps(table)) == table
    assert table["verdict"] == worst(findings).value


def test_long_lines_are_folded_below_their_text() -> None:
    finding = Finding(Severity.REFUSED, "word " * 40, "advice " * 20, ("n1",), "memory")
    lines = render([finding]).splitlines()
    assert lines[0].startswith("refused  memory        n1: word")
    assert all(len(line) <= 100 for line in lines)
    assert all(line.startswith(" " * 23) for line in lines[1:])
    assert set(EXIT_CODES) == {0, 1}


def test_of_a_job_without_exports_no_folder_is_judged() -> None:
    assert not [
        f for f in judge(facts(job=asked(drain_export_dir=None))) if f.check == "export folder"
    ]


def test_tcp_that_was_asked_for_is_ok() -> None:
    findings = judge(facts(world=world(tcp=True), job=asked(shard_bytes=GIB // 2)))
    assert worst(findings) is Severity.OK, render(findings)


@pytest.mark.parametrize("no_mpi", ["", "no libmpi.so"])
def test_long_shards_over_tcp_are_warned_of_with_rate_and_remedy(no_mpi: str) -> None:
    job = asked(shard_bytes=9 * 10**9, ranks_per_node=8)
    (found,) = [
        f
        for f in judge(facts(world=world(tcp=True, no_mpi=no_mpi), job=job))
        if f.check == "encoders"
    ]
    assert found.verdict is Severity.WARNING
    assert "0.9 GB/s a node: 8 ranks of 9.0 GB" in found.text and " 80 s " in found.text
    assert no_mpi in found.text and "mpi4py" in found.advice


class Deaf:
    """A transport between rank 0 and two others, the last of which never answers."""

    rank, size = 0, 3

    def isend(self, buffer: object, peer: int, tag: int) -> int:
        return peer

    irecv = isend

    def test(self, pending: list[int]) -> bool:
        return 2 not in pending


def test_ranks_that_do_not_answer_are_named() -> None:
    assert silent_ranks(cast(Transport, Deaf()), seconds=0.05) == (2,)


@pytest.mark.parametrize(
    ("fails", "broken"),
    [
        (lambda nodes: "n2" in nodes, ("n2",)),
        (lambda nodes: {"n3", "n4"} <= {*nodes}, ("n3", "n4")),
        (lambda nodes: len(nodes) == len(NODES), ()),
        (lambda nodes: True, NODES),
    ],
)
def test_the_nodes_in_the_way_of_a_world_are_found(
    fails: Callable[[Sequence[str]], bool], broken: tuple[str, ...]
) -> None:
    class Forged(TrialWorlds):
        async def _world(self, nodes: Sequence[str]) -> tuple[dict[str, TrialRank], str]:
            return {}, "orted died" if fails(nodes) else ""

    worlds = Forged(cast(Launcher, None), Path(), "t", "auto")
    found = asyncio.run(worlds.examine(NODES))
    assert (found.error, found.broken) == ("orted died", broken)


CONFIG = "PreemptMode             = {}\nSlurmctldParameters     = {}\n"
PARTITION = "PartitionName=low GraceTime={} Hidden=NO PreemptMode={} State=UP"


@pytest.mark.parametrize(
    ("mode", "parameters", "grace", "own", "lost"),
    [
        ("REQUEUE", "(null)", 120, "REQUEUE", True),
        ("REQUEUE", "enable_configless,preempt_send_user_signal", 120, "REQUEUE", False),
        ("REQUEUE", "(null)", 0, "REQUEUE", False),
        ("REQUEUE", "(null)", 120, "OFF", False),
        ("OFF", "(null)", 120, "OFF", False),
    ],
)
def test_a_grace_time_that_preemption_does_not_use_is_seen(
    mode: str, parameters: str, grace: int, own: str, lost: bool
) -> None:
    shown = CONFIG.format(mode, parameters), PARTITION.format(grace, own)
    assert loses_grace(*shown) is lost
    assert not loses_grace("", "")


def test_the_rule_of_what_snapshots_hold_is_that_of_the_framework() -> None:
    def said(**given: bool) -> str:
        found = judge(facts(job=asked(**given)))
        (text,) = (finding.text for finding in found if finding.check == "contents")
        return text

    assert "leave_out" in said(megatron=False, deepspeed=False)
    assert "client_state" in said(megatron=False, deepspeed=True)
    assert "masters" in said(megatron=True, deepspeed=False)
