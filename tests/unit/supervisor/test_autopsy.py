"""The judge of failures: logs as Python, torch and torchrun write them, and ends in any order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.errors import ConfigError
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.heartbeat_page import Call
from megatron_ft.supervisor.autopsy import (
    CLASSES,
    CUT,
    EXCEPTION,
    HANG,
    LEFT,
    LOADER,
    MEMORY,
    MISMATCH,
    NODE,
    OTHER_CALL,
    SIGNAL,
    UNKNOWN,
    Autopsy,
    DeadLog,
    Evidence,
    RankEvidence,
    is_settled,
    judge,
    read_log,
)
from megatron_ft.supervisor.ends import TrainerFailed
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.evidence import EvidenceKeeper, _Seen, numbers_in, read_kept
from megatron_ft.supervisor.heartbeats import Heartbeats
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.job_state import JobState

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690"

OWN = """\
iteration 7 loss 2.31
Traceback (most recent call last):
  File "/home/me/train.py", line 210, in <module>
    main()
  File "/home/me/data.py", line 31, in batch
    return tokens[index]
  File "/usr/lib/python3.12/site-packages/torch/_tensor.py", line 9, in __getitem__
    raise
IndexError: index 9 is out of range
"""


def traceback(message: str, function: str = "train_one") -> str:
    frame = f'  File "/home/me/train.py", line 31, in {function}\n    work()'
    return f"Traceback (most recent call last):\n{frame}\n{message}\n"


def prefixed(text: str, rank: int) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def test_the_last_frame_of_the_users_code_is_shown() -> None:
    found = read_log(OWN)
    assert found.frame == "batch (/home/me/data.py:31)"
    assert found.message == "IndexError: index 9 is out of range" and not found.from_others
    warning = "[W1126 c.cpp:1] Warning: a group of NCCL was not destroyed\n"
    assert read_log(prefixed(OWN, 3) + warning) == found


@pytest.mark.parametrize("message", [GLOO, NCCL])
def test_an_error_of_a_connection_is_of_others(message: str) -> None:
    assert read_log(traceback(message)).from_others
    after = traceback("KeyError: 'x'", "clean_up")
    during = "During handling of the above exception, another exception occurred:\n"
    assert read_log(f"{traceback(message)}\n{during}\n{after}").from_others
    assert not read_log(f"{after}\n{during}\n{traceback(message)}").from_others
    # An earlier one that was survived says nothing.
    assert not read_log(traceback(message) + "iteration 8\n" + after).from_others


def test_what_ends_no_process_is_no_exception() -> None:
    aside = "Exception in thread Thread-3:\n" + traceback("OSError: pipe")
    assert read_log(aside + "bye\n") == DeadLog(last_line="bye")
    assert read_log("") == DeadLog()


def test_an_abort_of_a_collective_is_of_others() -> None:
    text = "terminate called after throwing\n  what():  NCCL watchdog timeout\nframe #9: 0x1\n"
    assert read_log(text).from_others
    one = rank(0, place=0, status=-signal.SIGABRT, log=read_log(text))
    assert judge(evidence(one, rank(1))).kind == UNKNOWN


TORCHRUN = """\
E1126 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9)
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_02:17:11
  host      : h1
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 421)
  error_file: <N/A>
"""


def test_the_rank_that_torchrun_names_is_named() -> None:
    killed = rank(2, "n1", place=0, status=1, log=read_log(TORCHRUN.format(rank=3, code=-9)))
    found = judge(evidence(rank(0), killed))
    assert (found.rank, found.node, found.kind) == (3, "n1", SIGNAL)
    text = prefixed(traceback(GLOO), 2) + prefixed(OWN, 3) + prefixed(traceback(GLOO), 2)
    failed = rank(2, place=0, status=1, log=read_log(text + TORCHRUN.format(rank=3, code=1)))
    found = judge(evidence(rank(0), failed))
    assert (found.rank, found.kind) == (3, EXCEPTION) and "IndexError" in found.sentence


def rank(number: int, node: str = "", **fields: Any) -> RankEvidence:
    given = {"iteration": 17, "marks": 34, "phase": "training", "oom_kills": 0}
    return RankEvidence(rank=number, node=node or f"n{number}", **{**given, **fields})


def evidence(*ranks: RankEvidence, **fields: Any) -> Evidence:
    plain = {"job": "j", "incarnation": 1, "time": 0.0, "failure": "it failed", "cause": ""}
    return Evidence(ranks=ranks, **{"node": "", **plain, **fields})


FOLLOWER = {"status": 1, "log": read_log(traceback(GLOO))}
HUNG = {"hung": (1,), "hang": "the job waits for rank 1 on n1: it is behind all others"}

TABLE: Mapping[str, tuple[dict[str, Any], dict[str, Any], tuple[int, str, str]]] = {
    "SIGKILL": ({"place": 1, "status": -9}, {}, (1, "n1", SIGNAL)),
    "SIGSEGV": ({"place": 1, "status": -11}, {}, (1, "n1", SIGNAL)),
    "OOM": ({"place": 1, "status": -9, "oom_kills": 1}, {}, (1, "n1", MEMORY)),
    "OOM unread": ({"place": 1, "status": -9, "oom_kills": -1}, {}, (1, "n1", SIGNAL)),
    "exception": ({"place": 1, "status": 1, "log": read_log(OWN)}, {}, (1, "n1", EXCEPTION)),
    "exit 3": ({"place": 1, "status": 3}, {}, (1, "n1", LEFT)),
    "exit text": ({"place": 1, "status": 1, "log": read_log("no data\n")}, {}, (1, "n1", LEFT)),
    "exit 0": ({"place": 1, "status": 0}, {}, (1, "n1", LEFT)),
    "closed early": ({"place": 1, "status": 0, "phase": "ended"}, {}, (1, "n1", LEFT)),
    "no log": ({"place": 1, "status": 1}, {}, (1, "n1", UNKNOWN)),
    "node": ({"place": 1, "status": -9}, {"gone": ("n1",)}, (-1, "n1", NODE)),
    "cut": ({"place": 1, "status": -9}, {"silent": {"n1": 3.0}}, (-1, "n1", CUT)),
    "suspended": ({}, HUNG, (1, "n1", HANG)),
    "nobody": ({}, {}, (-1, "", UNKNOWN)),
    "none known": ({}, {"silent": {"n1": 3.0}}, (-1, "n1", UNKNOWN)),
    "known cut": ({}, {"silent": {"n1": 3.0}, "losses_known": True}, (-1, "n1", CUT)),
    "all silent": (
        {"place": 1, "status": -9},
        {"silent": {"n0": 3.0, "n1": 3.0, "n2": 3.0}},
        (-1, "", UNKNOWN),
    ),
}


@pytest.mark.parametrize("fault", TABLE)
def test_each_fault_is_named(fault: str) -> None:
    end, more, expected = TABLE[fault]
    consequence = {"place": 0, **FOLLOWER} if "place" in end else {}
    found = judge(evidence(rank(0, **consequence), rank(1, **end), rank(2), **more))
    assert (found.rank, found.node, found.kind) == expected, found
    assert found.kind in CLASSES and "2 ran: iteration 17 ended" in " ".join(found.waiting)


def call(name: str, sequence: int, group: str = "default", left: float = 0.0) -> Call:
    return Call(sequence, sequence, 4000, 17, 1.0, left, name, group)


def test_the_collective_that_is_missing_is_named() -> None:
    inside, left = call("all_reduce", 12), call("all_reduce", 11, left=2.0)
    ranks = [rank(i, calls=(call("barrier", 3, "tp", 1.5), inside)) for i in range(4)]
    behind = evidence(*ranks[:3], rank(3, calls=(left,)), hung=(0, 1, 2, 3), hang="nobody knows")
    found = judge(behind)
    assert (found.rank, found.kind, found.how) == (3, HANG, "")
    assert "rank 3 has not called all_reduce #12 of group default" in found.sentence
    assert found.waiting == (
        "ranks 0-2 ran: iteration 17 ended, 34 marks, phase training, "
        "in all_reduce #12 of group default",
    )
    other = rank(3, calls=(call("barrier", 12),))
    found = judge(evidence(*ranks[:3], other, hung=(0, 1, 2, 3), hang="nobody knows"))
    assert (found.rank, found.how) == (3, OTHER_CALL)
    assert "rank 3 is in barrier #12, the others in all_reduce" in found.sentence


@pytest.mark.parametrize("aborted", [0, 3], ids=["an innocent one", "the odd one"])
def test_the_rank_with_another_size_is_named(aborted: int) -> None:
    """gloo aborts the process that gets more than it has room for, whoever was wrong."""
    usual, odd = call("all_reduce", 12, left=2.0), call("all_reduce", 12, left=2.0)
    odd = msgspec.structs.replace(odd, size=28)
    ranks = [rank(i, calls=(call("barrier", 11, left=1.0), usual)) for i in range(3)]
    ranks.append(rank(3, calls=(odd,)))
    text = "what():  [enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes\n"
    end = {"place": 0, "status": -signal.SIGABRT, "log": read_log(text)}
    ranks[aborted] = msgspec.structs.replace(ranks[aborted], **end)
    found = judge(evidence(*ranks))
    assert (found.rank, found.node, found.kind) == (3, "n3", MISMATCH), found
    assert "with 28 bytes, the others with 4000" in found.sentence
    hung = [rank(one.rank, calls=one.calls) for one in ranks]
    found = judge(evidence(*hung, hung=(0, 1, 2, 3), hang="nobody knows"))
    assert (found.rank, found.kind, found.how) == (3, HANG, OTHER_CALL)
    two = evidence(*ranks[:1], *ranks[3:])
    assert judge(two).rank == -1, "one of two"


def test_an_exception_of_a_rank_that_is_slow_to_end_is_no_hang() -> None:
    own = {"log": read_log(OWN)}
    for end in ({}, {"place": 0, "status": 1}):
        found = judge(evidence(rank(0), rank(1, **own, **end), rank(2), **HUNG))
        assert (found.rank, found.kind) == (1, EXCEPTION), found
    later = read_log(OWN + "iteration 8 loss 2.30\n")
    assert judge(evidence(rank(0), rank(1, log=later), **HUNG)).kind == HANG, "it was caught"
    assert judge(evidence(rank(0), rank(1, log=FOLLOWER["log"]), **HUNG)).kind == HANG


def test_ranks_that_lost_a_connection_are_waited_behind() -> None:
    assert not is_settled([rank(0, place=0, **FOLLOWER)])
    assert is_settled([rank(0, place=0, **FOLLOWER), rank(1, place=1, status=-9)])


def test_how_a_rank_hangs_is_told_of_that_rank_alone() -> None:
    assert judge(evidence(rank(0), rank(1), **HUNG, how=LOADER)).how == LOADER
    killed = rank(1, place=0, status=-9)
    assert judge(evidence(rank(0), killed, how=LOADER)).how == ""
    both = {**HUNG, "hung": (0, 1)}
    assert judge(evidence(rank(0), rank(1), **both, how=LOADER)).how == ""


def test_calls_that_tell_nobody_apart_name_nobody() -> None:
    hang = {"hung": (0, 1, 2), "hang": "nobody knows"}
    inside = (call("all_reduce", 12),)
    for third in (inside, (), (call("all_reduce", 3, "pp", left=1.0),)):
        ranks = rank(0, calls=inside), rank(1, calls=inside), rank(2, calls=third)
        found = judge(evidence(*ranks, **hang))
        assert (found.rank, found.sentence) == (-1, "nobody knows")
    two = rank(0, calls=inside), rank(1, calls=(call("barrier", 12),))
    assert judge(evidence(*two, hung=(0, 1), hang="nobody knows")).rank == -1
    halves = [rank(i, calls=(call("all_reduce", 12 - i // 2),)) for i in range(4)]
    assert judge(evidence(*halves, hung=(0, 1, 2, 3), hang="nobody knows")).rank == -1


def places(count: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(list(range(count)))


@given(places(4), st.sampled_from([0, 1, 2, 3]))
def test_ranks_that_follow_are_never_named(order: list[int], culprit: int) -> None:
    """In whatever order the ends were seen."""
    ranks = [rank(i, place=place, **FOLLOWER) for i, place in enumerate(order)]
    assert judge(evidence(*ranks)).kind == UNKNOWN
    assert judge(evidence(*ranks)).rank == -1
    ranks[culprit] = rank(culprit, place=order[culprit], status=-9)
    assert judge(evidence(*ranks)) == Autopsy(
        culprit, f"n{culprit}", SIGNAL, judge(evidence(*ranks)).sentence,
        judge(evidence(*ranks)).waiting,
    )  # fmt: skip


def test_a_torn_folder_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / ".003.tmp").mkdir()
    (tmp_path / "002").mkdir()
    assert numbers_in(tmp_path) == [2] and numbers_in(tmp_path / "none") == []
    with pytest.raises(ConfigError, match="holds no evidence"):
        read_kept(tmp_path / "002")


@dataclass
class Nodes:
    """The fleet and the trainers as an evidence keeper sees them: none has ended yet."""

    observers: Observers = field(default_factory=Observers)
    listeners: list[Callable[[m.NodeEvent], None]] = field(default_factory=list)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    incarnation: int = 3

    def listen(self, listener: Callable[[m.NodeEvent], None]) -> None:
        """As of Fleet."""
        self.listeners.append(listener)

    def nodes_by_rank(self) -> dict[int, str]:
        """No rank."""
        return {}

    def hear(self, body: Any) -> None:
        """An event of a node."""
        for listener in self.listeners:
            listener(m.NodeEvent("n0", self.incarnation, body))


def test_the_versions_are_those_of_the_trainers(tmp_path: Path) -> None:
    """This process may find other releases, and may hear of ranks that say nothing."""
    nodes = Nodes()
    cluster = VirtualCluster("job", ["n0"], tmp_path / "arenas")
    with JobState(tmp_path / "kept", "job") as state:
        job = SimpleNamespace(
            state=state, launcher=cluster, fleet=nodes, trainers=nodes, observers=nodes.observers
        )
        keeper = EvidenceKeeper(cast(JobContext, job))
    versions = {"python": "3.9.2", "megatron-core": "0.20.0", "torch": "2.12.1"}
    hello = m.Hello(1, 0, 0, "dp0", (0,), 3, versions=versions)
    nodes.hear(hello)
    nodes.hear(m.Hello(2, 1, 1, "dp1", (1,), 3))
    _, folder = keeper._keep(TrainerFailed("a trainer ended"), _Seen({}, (), {}))
    kept = read_kept(folder).evidence.versions
    assert versions.items() <= kept.items() and {"linux", "megatron-ft"} <= kept.keys(), kept
