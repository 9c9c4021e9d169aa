"""Findings from forged facts: each thing that is wrong is named, with its node."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena.format import BLOCK_BYTES
from megatron_ft.arena.limits import MemoryReading
from megatron_ft.cli.doctor.checks import judge
from megatron_ft.cli.doctor.command import EXIT_CODES, parameters_of, shard_size
from megatron_ft.cli.doctor.examine import clock_between, judge_no_kill, warning
from megatron_ft.cli.doctor.facts import (
    Clock,
    DrainPlace,
    ExportPlace,
    Facts,
    Leftover,
    Rates,
)
from megatron_ft.cli.doctor.node_checks import node_bytes, shortest_scheme
from megatron_ft.cli.doctor.pairs import all_pairs
from megatron_ft.cli.doctor.report import (
    Finding,
    Judged,
    Severity,
    as_json,
    by_node,
    render,
    worst,
)
from megatron_ft.core.scheme import Scheme
from megatron_ft.launchers.container import python_of
from tests.support.doctor_facts import (
    GIB,
    NODES,
    PACKAGES,
    STEP,
    arena,
    exports,
    facts,
    node,
    trainer,
    wishes,
    with_node,
    with_trainer,
    world,
)

RS = Scheme.parse("rs:3+1")
SLOW_PAIRS = {p: 2e9 if "n2" in p else 20e9 for p in all_pairs(NODES)}
ONE_DEAD = {p: 0.0 if "n2" in p else 20e9 for p in all_pairs(NODES)}
RACKS = {"n0": "r0", "n1": "r0", "n2": "r0", "n3": "r1", "n4": "r1"}
OLD = PACKAGES | {"megatron-core": "0.16.9", "deepspeed": "0.18.0"}

# What is wrong, which check says so and how, and the node that must be named ("" for none).
CASES: list[tuple[Facts, str, str, str, str]] = [
    (facts(nodes={**facts().nodes, "n2": "ssh: no route"}), "nodes", "refused", "no route", "n2"),
    (facts(wishes=wishes(spares=(), active=NODES[:4])), "spares", "warning", "no spare", ""),
    (facts(wishes=wishes(scheme=Scheme.parse("none")), world=None), "protection", "warning",
     "", ""),
    (facts(wishes=wishes(domains=RACKS)), "protection", "refused", "r0 holds 3 (", ""),
    (facts(no_kill="missing"), "slurm", "refused", "kills the whole job", ""),
    (facts(no_kill="unknown"), "slurm", "warning", "does not tell", ""),
    (facts(no_kill="in the script"), "slurm", "warning", "unknown", ""),
    (with_trainer("n2", cgroup=STEP.format("1")), "steps", "refused", "share the cgroup", "n2"),
    (with_trainer("n2", python="3.9.2"), "versions", "refused", "3.9.2", "n2"),
    (with_trainer("n2", packages={}), "versions", "refused", "no torch", "n2"),
    (with_trainer("n2", packages=OLD), "versions", "refused", "megatron-core 0.16.9 is too", "n2"),
    (facts(wishes=wishes(command_python=False)), "versions", "warning", "no word", ""),
    (with_node("n2", code="beef"), "same code", "refused", "beef on n2", ""),
    (with_trainer("n2", packages={**PACKAGES, "numpy": "1.0"}), "same code", "warning",
     "numpy (none on n0, n1, n3, n4; 1.0 on n2)", ""),
    (with_node("n2", arena=arena(error="Permission denied")), "arena folder", "refused", "Perm",
     "n2"),
    (with_node("n2", arena=arena(filesystem="ext4", inode=102)), "arena folder", "warning", "ext4",
     "n2"),
    (with_node("n2", arena=arena(inode=102, limits=(MemoryReading("memory.max", 200 * GIB),))),
     "memory", "refused", "memory.max leaves 200.00 GiB", "n2"),
    (facts(wishes=wishes(shard_bytes=None)), "memory", "warning", "need not known", ""),
    (with_node("n2", arena=arena(inode=102, leftovers=(Leftover("old", GIB, ""),))), "leftovers",
     "warning", "old (1.00 GiB)", "n2"),
    (with_trainer("n2", inode=7), "same arena", "refused", "a trainer does not see", "n2"),
    (with_trainer("n2", inode=0, error="FileNotFoundError: x"), "same arena", "refused",
     "FileNotFoundError", "n2"),
    (facts(trainers={**facts().trainers, "n2": "no such image"}), "same arena", "refused",
     "no such image", "n2"),
    (with_node("n2", remove_ipc=True), "RemoveIPC", "warning", "vanish", "n2"),
    (with_node("n2", descriptors=256), "descriptors", "refused", "256 open files", "n2"),
    (with_node("n2", locked_memory=65536), "locked memory", "warning", "64.00 KiB", "n2"),
    (with_node("n2", cpus=8), "cores", "warning", "8 cores", "n2"),
    (with_node("n2", rates=Rates(error="No space left")), "rates", "refused", "No space", "n2"),
    (with_node("n2", rates=Rates(3e9, 3e9, 5e9)), "rates", "warning", "memory runs at 30%", "n2"),
    (with_node("n2", rates=Rates(10e9, 4.6e9, 5e9)), "rates", "warning", "50% of memcpy", "n2"),
    (facts(world=world(rates=SLOW_PAIRS)), "pairs", "warning", "10% of the typical", "n2"),
    (facts(world=world(rates=ONE_DEAD)), "pairs", "refused", "to nobody", "n2"),
    (facts(world=world(error="orted died", joined={}, broken=("n2",))), "mpi", "refused",
     "orted died", "n2"),
    (facts(world=world(error="too many", joined={}, broken=())), "mpi", "refused",
     "worlds of two nodes work", ""),
    (facts(world=world(tcp=True, no_mpi="no libmpi.so")), "mpi", "warning",
     "because no MPI can be loaded: no libmpi.so", ""),
    (facts(clocks={**facts().clocks, "n2": Clock(4.0, 4.5)}), "clocks", "warning", "4.0 s", "n2"),
    (facts(clocks={**facts().clocks, "n2": Clock(-9.0, -8.5)}), "clocks", "warning", "8.5 s", "n2"),
    (facts(wishes=wishes(drain_dir="")), "drain folder", "warning", "no --drain-dir", ""),
    (with_node("n2", drain=DrainPlace(error="Read-only file system")), "drain folder", "refused",
     "Read-only", "n2"),
    (with_node("n2", drain=DrainPlace(1e9, "", 1 << 50)), "drain folder", "refused",
     "another folder", "n2"),
    (with_node("n2", drain=DrainPlace(1e9, ".token", GIB)), "drain folder", "refused",
     "only 1.00 GiB are free", ""),
    (with_node("n2", drain=DrainPlace(1e9, ".token", 959 * GIB)), "drain folder", "warning",
     "only 959.00 GiB are free", ""),
    (with_node("n2", drain=DrainPlace(1e8, ".token", 1 << 50)), "drain folder", "warning",
     "10% of the typical", "n2"),
    (facts(exports=(exports(holder="job 'other' (process 7 on x)"),)), "export folder", "refused",
     "--drain-export-dir /exports: job 'other' (process 7 on x) exports there", ""),
    (facts(exports=(exports(problem="No locks available"),)), "export folder", "warning",
     "cannot be locked (No locks available)", ""),
    (with_node("n2", exports={"/exports": ExportPlace(error="Read-only file system")}),
     "export folder", "refused", "/exports: Read-only", "n2"),
    (with_node("n2", exports={"/exports": ExportPlace()}), "export folder", "refused",
     "another folder than here", "n2"),
    (with_node("n2", exports={"/exports": ExportPlace(same=True, problem="No locks available")}),
     "export folder", "warning", "cannot be locked there (No locks available)", "n2"),
    (with_node("n2", exports={"/exports": ExportPlace(same=True)}), "export folder", "warning",
     "a lock that is taken here is not seen there", "n2"),
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
    assert {f.check for f in bad} - {check} <= {"same code", "versions", "rates"}, render(bad)


def test_a_missing_framework_is_refused_where_it_is_used() -> None:
    bare = {"torch": "2.13.0"}
    for flags, verdict in (
        ({}, "ok"),
        ({"megatron": True}, "warning"),
        ({"deepspeed": True}, "refused"),
    ):
        asked = wishes(**({"megatron": False} | flags))
        spoiled = facts(wishes=asked, trainers={n: trainer(n, packages=bare) for n in NODES})
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


def test_tcp_locks_no_memory_and_system_users_keep_their_files() -> None:
    tcp = {"fabric": "OMPI_MCA_btl=self,tcp"}
    ranks = {n: msgspec.structs.replace(rank, **tcp) for n, rank in world().joined.items()}
    nodes = {n: node(n, locked_memory=65536, remove_ipc=True, user=0) for n in NODES}
    assert worst(judge(facts(nodes=nodes, world=world(joined=ranks)))) is Severity.OK
    nodes = {n: node(n, remove_ipc=True, lingers=True) for n in NODES}
    assert worst(judge(facts(nodes=nodes))) is Severity.OK


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


def test_the_size_of_a_shard_comes_from_the_user_or_from_megatrons_flags() -> None:
    assert shard_size(1.5, 7e9, [], 8) == (3 << 29, "--shard-gib")
    assert shard_size(None, 7e9, [], 8)[0] == 7e9 * 12 / 8
    # GPT-3 175B: 96 layers of 12288, a vocabulary of 51200.
    gpt3 = "--num-layers 96 --hidden-size=12288 --num-attention-heads 96 --vocab-size 51200".split()
    assert parameters_of(gpt3) == pytest.approx(174.6e9, rel=0.01)
    # Llama 3 8B has 8.03e9.
    llama = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--vocab-size 128256 --untie-embeddings-and-output-weights"
    ).split()
    assert parameters_of(llama) == pytest.approx(8.03e9, rel=0.01)
    assert parameters_of([*gpt3, "--num-experts", "8"]) == 0
    assert shard_size(None, None, ["python", "train.py", "--num-layers", "x"], 8)[0] is None


def test_clocks_are_bounded_by_the_round_trip() -> None:
    asked, began, ended, answered = 100.0, 100.4, 102.0, 102.5
    for ahead in (0.0, 3.0, -7.0):
        clock = clock_between(asked, began + ahead, ended + ahead, answered)
        assert clock.least <= ahead <= clock.most
        assert clock.most - clock.least == pytest.approx(0.9)


def test_what_wraps_the_trainers_python_is_kept() -> None:
    wrapped = ["apptainer", "exec", "x.sif", "/opt/bin/python3.11"]
    assert python_of([*wrapped, "train.py", "python"]) == wrapped
    assert python_of(["torchrun", "train.py"]) is None


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=5\n#SBATCH{} --requeue\nsrun --no-kill x\n"


@pytest.mark.parametrize(
    ("script", "line", "variables", "expected"),
    [(" --no-kill", None, {}, "in the script"), (" -k", "sbatch job.sh", {}, "set"),
     ("", "sbatch --no-kill job.sh", {}, "set"), ("", "sbatch job.sh", {}, "missing"),
     ("", None, {}, "unknown"), ("", None, {"SBATCH_NO_KILL": "1"}, "in the script"),
     ("", "sbatch job.sh", {"SBATCH_NO_KILL": "1"}, "set"),
     (" --no-kill", "sbatch --no-kill=off job.sh", {}, "missing"),
     (" --no-kill", None, {"SBATCH_NO_KILL": "off"}, "missing"),
     (" --no-killer", "sbatch job.sh", {}, "missing")],
)  # fmt: skip
def test_no_kill_is_read_as_sbatch_reads_it(
    script: str, line: str | None, variables: dict[str, str], expected: str
) -> None:
    assert judge_no_kill(SCRIPT.format(script), line, variables) == expected


@pytest.mark.parametrize(
    ("found", "warned"),
    [(None, False), ("set", False), ("in the script", False), ("missing", True), ("unknown", True)],
)
def test_a_job_that_a_lost_node_may_kill_is_warned_at_its_start(
    found: str | None, warned: bool
) -> None:
    assert ("put `#SBATCH --no-kill`" in warning(found)) == warned


@given(st.lists(st.sampled_from(list(Severity)), min_size=1, max_size=6))
def test_nodes_are_grouped_and_the_worst_counts(verdicts: list[Severity]) -> None:
    said = {f"n{i}": verdict for i, verdict in enumerate(verdicts)}
    judged = by_node(said, lambda verdict: Judged(verdict, f"is {verdict.value}"))
    findings = [Finding("x", *one) for one in judged]
    assert worst(findings) is max(verdicts, key=list(Severity).index) is findings[0].verdict
    named = [n for f in findings for n in f.nodes]
    assert sorted(named) == (sorted(said) if len(set(verdicts)) > 1 else [])
    table = as_json(findings)
    assert json.loads(json.dumps(table)) == table
    assert table["verdict"] == worst(findings).value


def test_long_lines_are_folded_below_their_text() -> None:
    finding = Finding("memory", Severity.REFUSED, "word " * 40, "advice " * 20, ("n1",))
    lines = render([finding]).splitlines()
    assert lines[0].startswith("refused  memory        n1: word")
    assert all(len(line) <= 100 for line in lines)
    assert all(line.startswith(" " * 23) for line in lines[1:])
    assert set(EXIT_CODES) == {0, 1, 3}


def test_of_a_job_without_exports_no_folder_is_judged() -> None:
    assert not [f for f in judge(facts(exports=())) if f.check == "export folder"]


def test_tcp_that_was_asked_for_is_ok() -> None:
    findings = judge(facts(world=world(tcp=True)))
    assert worst(findings) is Severity.OK, render(findings)
    assert any("as --transport says" in f.text for f in findings if f.check == "mpi")
