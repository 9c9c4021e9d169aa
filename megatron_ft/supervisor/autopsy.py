"""Judges a failure: which rank stopped first, and in which way.  Pure.

Ranks that die of a connection to a rank that is gone are not the cause, however early their end is
known.  What evidence does not tell is "unknown".
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from megatron_ft.rpc.heartbeat_page import Call
from megatron_ft.supervisor.heartbeats import in_ranges

SIGNAL, MEMORY, EXCEPTION, HANG = "signal", "out of memory", "exception", "hang"
LEFT, NODE, CUT, UNKNOWN = "left early", "node loss", "cut network", "unknown"
MISMATCH = "mismatched collective"

CLASSES: Mapping[str, str] = {
    SIGNAL: "a signal ended the process: of somebody else, or of its own fault (SIGSEGV)",
    MEMORY: "the kernel's OOM killer ended it: its memory cgroup counts the kill",
    EXCEPTION: "Python ended with an exception that is not of a connection to another rank",
    HANG: "no rank made progress, and the watch named whom the job waited for",
    LEFT: "the process ended by itself, without an exception, while others trained",
    MISMATCH: "a collective failed that one rank called with another size than the others",
    NODE: "the launcher says that the node is gone",
    CUT: "the node stopped answering, but is known to live",
    UNKNOWN: "evidence does not tell",
}

SUSPENDED, LOCKED, LOADER, OTHER_CALL = (
    "suspended", "interpreter locked", "data loader", "other collective"
)  # fmt: skip

HOW: Mapping[str, str] = {
    SUSPENDED: "a signal or a debugger has stopped its process",
    LOCKED: "C code holds the interpreter's lock, so that no thread of Python runs",
    LOADER: "it waits for data in its data loader",
    OTHER_CALL: "it has called another collective than the others, or with another size",
}
"""Ways in which the rank hangs that a hang is blamed on."""

_FROM_OTHERS = re.compile(
    r"gloo|NCCL|DistBackendError|DistNetworkError|DistStoreError|TCPStore|ConnectionError"
    r"|Connection closed by peer|Connection re(set|fused)|Broken pipe|RestartRequested"
)
"""Errors of a connection to another rank, by name or by text."""


class DeadLog(msgspec.Struct, frozen=True):
    """The end that a rank's log tells: last frame and message of its exception, last line.

    ``child`` is the rank and exit code that torchrun names as the first failure.
    """

    frame: str = ""
    message: str = ""
    from_others: bool = False
    last_line: str = ""
    child: tuple[int, int] | None = None

    @property
    def failed(self) -> bool:
        """True if an exception of its own is the last that it tells."""
        return (
            bool(self.message) and self.message.strip() == self.last_line and not self.from_others
        )


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence on one rank.  Times are in seconds.

    ``place`` in the order of ends that were seen before the supervisor ended the others, and
    ``after`` how long after the first: -1 and 0 if it still ran; ``status`` is that of its exit,
    below zero a signal.  The rest is of its last heartbeat, if one came: ``idle`` since its last
    mark, ``state`` of its process, ``oom_kills`` in its cgroup, -1 if unknown, ``calls`` of
    collectives, the newest last.
    """

    rank: int
    node: str
    place: int = -1
    after: float = 0.0
    status: int | None = None
    iteration: int | None = None
    marks: int = 0
    phase: str = "unknown"
    idle: float = 0.0
    state: str = ""
    oom_kills: int = -1
    log: DeadLog = DeadLog()
    calls: tuple[Call, ...] = ()

    @property
    def inside(self) -> Call | None:
        """The collective that it waits in, None if it is in none or that is not known."""
        return self.calls[-1] if self.calls and not self.calls[-1].left else None

    @property
    def finished(self) -> bool:
        """True if it ended well after its training."""
        return self.status == 0 and self.phase == "ended"

    @property
    def follows(self) -> bool:
        """True if it ended because another rank was gone."""
        own = (self.status or 0) > 0 or self.status == -signal.SIGABRT
        return own and self.log.from_others


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of the unplanned end of an incarnation; ``time`` is in seconds since 1970.

    ``gone`` are nodes that the launcher counts as lost, ``losses_known`` is whether it knows of
    each loss at once; ``silent`` maps nodes to the seconds since their last answer, where those
    come near to a lease, at whose end a node that is cut off ends its own trainers.  ``hung`` are
    the ranks that the watch named, ``hang`` its sentence, ``how`` a key of HOW or empty.
    """

    job: str
    incarnation: int
    time: float
    failure: str
    cause: str
    node: str
    ranks: tuple[RankEvidence, ...] = ()
    gone: tuple[str, ...] = ()
    losses_known: bool = False
    silent: dict[str, float] = {}
    hung: tuple[int, ...] = ()
    hang: str = ""
    how: str = ""
    versions: dict[str, str] = {}
    events: tuple[str, ...] = ()

    def ended(self) -> list[RankEvidence]:
        """Ranks that ended before the supervisor ended the others, in that order."""
        return sorted((one for one in self.ranks if one.place >= 0), key=lambda one: one.place)


class Autopsy(msgspec.Struct, frozen=True):
    """The rank that stopped first (-1: not a single known one), its node, and the class.

    ``sentence`` gives the reason, ``waiting`` has a line for each group of the others.  ``how`` is
    a key of HOW for a hang where that is known.
    """

    rank: int
    node: str
    kind: str
    sentence: str
    waiting: tuple[str, ...] = ()
    how: str = ""


def judge(evidence: Evidence) -> Autopsy:
    """The verdict on one failure; of class "unknown" where evidence tells nothing certain."""
    rank, node, kind, sentence = _judge(evidence)
    others = [one for one in evidence.ranks if one.rank != rank]
    how = evidence.how if kind == HANG and evidence.hung == (rank,) else ""
    apart = _apart(evidence.ranks) or _odd_size(evidence.ranks)
    if kind == HANG and not how and apart.get(rank, "").startswith((_IS_IN, _CALLED)):
        how = OTHER_CALL
    return Autopsy(rank, node, kind, sentence, tuple(_waiting(others, evidence)), how)


def is_settled(ended: Sequence[RankEvidence]) -> bool:
    """True if some end seen so far is not explained by another rank's end."""
    return any(not one.finished and not one.follows for one in ended)


_Finding = tuple[int, str, str, str]
_IS_IN, _CALLED = "is in", "called"


def _judge(evidence: Evidence) -> _Finding:
    ended = evidence.ended()
    first = next((one for one in ended if not one.finished and not one.follows), None)
    homes = {one.node for one in evidence.ranks}
    gone = [node for node in evidence.gone if node in homes]
    if gone and (first is None or first.node in gone):
        names = ", ".join(gone)
        return -1, gone[0], NODE, f"{names} is gone, and {_ranks_on(evidence, gone)} with it"
    silent = [node for node in evidence.silent if node in homes]
    if silent and (first is None or (first.node in silent and first.status == -signal.SIGKILL)):
        return _of_silence(silent, first, evidence, all_silent=homes <= evidence.silent.keys())
    failed = [one for one in evidence.ranks if one.rank in evidence.hung and one.log.failed]
    if len(failed) == 1 and first is None:
        # It has raised, and takes longer to end than others wait for it.
        return _of_end(msgspec.structs.replace(failed[0], status=1))
    raised = first is not None and first.status == 1 and bool(first.log.message)
    if evidence.hang and not raised and (first is None or first.status):
        apart = _apart(evidence.ranks) or _odd_size(evidence.ranks)
        hung = evidence.hung if len(evidence.hung) == 1 or len(apart) != 1 else tuple(apart)
        text = "".join(f"; rank {rank} {apart[rank]}" for rank in hung if rank in apart)
        rank = hung[0] if len(hung) == 1 else -1
        return rank, _node_of(evidence, hung), HANG, evidence.hang + text
    if first is not None:
        return _of_end(first)
    finished = [one for one in ended if one.finished]
    if finished and any(not one.finished for one in evidence.ranks):
        one = finished[0]
        text = f"rank {one.rank} closed its training and ended with 0; others still trained"
        return one.rank, one.node, LEFT, text
    if ended and (odd := _odd_size(evidence.ranks)):
        ((rank, text),) = odd.items()
        node = _node_of(evidence, (rank,))
        return rank, node, MISMATCH, f"rank {rank} on {node} {text}"
    if ended:
        names = _named([one.rank for one in ended])
        return -1, "", UNKNOWN, f"{names} lost a connection to another rank; nobody else had ended"
    return -1, evidence.node, UNKNOWN, evidence.failure


def _of_silence(
    silent: Sequence[str], first: RankEvidence | None, evidence: Evidence, *, all_silent: bool
) -> _Finding:
    """The finding on silent nodes: only one that still ends its own trainers is known to live."""
    node = silent[0] if first is None else first.node
    text = f"{node} has not answered for {evidence.silent[node]:.1f} s"
    if all_silent:
        return -1, "", UNKNOWN, f"{text}, nor has any other node: this supervisor was cut off"
    if first is not None:
        return -1, node, CUT, f"{text}, and has ended its trainers: {_ranks_on(evidence, silent)}"
    if evidence.losses_known:
        return -1, node, CUT, f"{text}, and is not lost: {_ranks_on(evidence, silent)} cut off"
    return -1, node, UNKNOWN, f"{text}: it is lost, suspended or cut off"


def _apart(ranks: Sequence[RankEvidence]) -> dict[int, str]:
    """Ranks outside the collective in which most ranks wait, with a text on each.

    Of a group that not all ranks are in, those that are not are not known: they are left out.
    """
    waits = Counter(
        (call.group, call.sequence, call.name)
        for one in ranks
        if (call := one.inside) is not None and call.sequence
    ).most_common(1)
    if not waits or 2 * waits[0][1] <= len(ranks) - 1:
        return {}
    (group, sequence, name), count = waits[0]
    missing = f"{name} #{sequence} of group {group}"
    found = {}
    for one in ranks:
        last = next((call for call in reversed(one.calls) if call.group == group), None)
        if last is None or (last.sequence, last.name) == (sequence, name):
            continue
        if last.sequence < sequence:
            found[one.rank] = f"has not called {missing}; its last was #{last.sequence}"
        elif last.sequence == sequence and 2 * count > len(ranks):
            found[one.rank] = f"{_IS_IN} {last.name} #{sequence}, the others in {missing}"
    return found


_EVEN = frozenset(
    {"all_reduce", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor"}
)
"""Collectives whose first tensor has the same size on all ranks."""


def _odd_size(ranks: Sequence[RankEvidence]) -> dict[int, str]:
    """The rank whose last call has another size than that of the others, with a text on it.

    Empty if there is no single one.
    """
    last = {one.rank: one.calls[-1] for one in ranks if one.calls}
    calls = Counter(
        (call.group, call.sequence, call.name) for call in last.values() if call.name in _EVEN
    ).most_common(1)
    if not calls:
        return {}
    group, sequence, name = which = calls[0][0]
    sizes = {r: c.size for r, c in last.items() if (c.group, c.sequence, c.name) == which}
    usual, count = Counter(sizes.values()).most_common(1)[0]
    odd = [rank for rank, size in sizes.items() if size != usual]
    if len(odd) != 1 or count < 2:
        return {}
    text = f"{_CALLED} {name} #{sequence} of group {group} with {sizes[odd[0]]} bytes"
    return {odd[0]: f"{text}, the others with {usual}"}


def _of_end(one: RankEvidence) -> _Finding:
    """The class of a rank's end that no other rank explains."""
    rank, node, status, log = one.rank, one.node, one.status or 0, one.log
    if log.child is not None:
        rank, status = log.child
    who = f"rank {rank} on {node}"
    if status < 0:
        name = _signal_name(-status)
        if status == -signal.SIGKILL and one.oom_kills > 0:
            text = f"the OOM killer struck in its memory cgroup ({one.oom_kills} times)"
            return rank, node, MEMORY, f"{who} was killed by {name}: {text}"
        ruled = {-1: "; whether by the OOM killer cannot be read", 0: "; not by the OOM killer"}
        hint = ruled.get(one.oom_kills, "") if status == -signal.SIGKILL else ""
        return rank, node, SIGNAL, f"{who} was killed by {name}{hint}"
    if status == 1 and log.message:
        return rank, node, EXCEPTION, f"{who}: {log.message}; at {log.frame}"
    if status == 1 and not log.last_line:
        return rank, node, UNKNOWN, f"{who} exited with 1, and its log tells no reason"
    said = f"; its last line: {log.last_line}" if log.last_line else ""
    return rank, node, LEFT, f"{who} exited with {status} without an exception{said}"


def _waiting(others: Iterable[RankEvidence], evidence: Evidence) -> Iterable[str]:
    groups: dict[str, list[int]] = {}
    for one in others:
        if one.place >= 0:
            text = f"ended by itself with {one.status}"
            text += f", {one.after:.1f} s after the first" if one.after else ", first"
            text += f": {one.log.message}" if one.log.message else ""
        elif one.node in evidence.gone:
            text = f"was on {one.node}"
        elif one.iteration is None:
            text = "ran; no heartbeat came from it"
        else:
            text = f"ran: iteration {one.iteration} ended, {one.marks} marks, phase {one.phase}"
            text += f", in {one.inside}" if one.inside else ""
        groups.setdefault(text, []).append(one.rank)
    return [f"{_named(ranks)} {text}" for text, ranks in groups.items()]


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s'[: len(ranks) - 1]} {in_ranges(sorted(ranks))}"


def _ranks_on(evidence: Evidence, nodes: Sequence[str]) -> str:
    return _named([one.rank for one in evidence.ranks if one.node in nodes])


def _node_of(evidence: Evidence, ranks: Sequence[int]) -> str:
    nodes = {one.node for one in evidence.ranks if one.rank in ranks}
    return nodes.pop() if len(nodes) == 1 else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_PREFIX = re.compile(r"^\[(?:rank|default)?(\d+)\]: ?")
"""Torch puts the rank before each line of an exception, and torchrun before all lines."""

_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
LIBRARY = re.compile(r"/torch/|/megatron_ft/|<frozen |/lib/python3[^/]*/(?!(site|dist)-packages/)")
"""PyTorch, Python's own library, and us: a place in them shows less than its caller."""

_ROOT = re.compile(
    r"Root Cause \(first observed failure\):.*?^\s*rank\s*: (?P<rank>\d+) .*?"
    r"^\s*exitcode\s*: (?P<code>-?\d+)",
    re.MULTILINE | re.DOTALL,
)
_NOT_THE_END = ("Exception in thread", "Exception ignored in")
_CHAINED = ("The above exception was", "During handling of the above")
_WARNING = "[W"
"""Begins the warnings of PyTorch's C++: of a process group at the exit, for example."""
_ABORTED = re.compile(r"what\(\):.*(gloo|NCCL|Connection closed|Connection reset)")


def read_log(text: str) -> DeadLog:
    """The end that the last lines of a rank's log tell."""
    root = _ROOT.search(text)
    child = (int(root["rank"]), int(root["code"])) if root else None
    lines = text.splitlines()
    if child is not None:
        marked = [one for one in lines if (m := _PREFIX.match(one)) and int(m[1]) == child[0]]
        lines = marked or lines
    lines = [text for line in lines if (text := _PREFIX.sub("", line)).strip()]
    last = next((line.strip() for line in reversed(lines) if not line.startswith(_WARNING)), "")
    others = bool(_FROM_OTHERS.search(last)) or any(map(_ABORTED.search, lines))
    frame = message = ""
    for head in (i for i, line in enumerate(lines) if line == _HEAD):
        before, found = lines[head - 1] if head else "", _exception(lines[head + 1 :])
        if before.startswith(_NOT_THE_END) or found is None or "ChildFailedError" in found[1]:
            continue
        if not (message and before.startswith(_CHAINED)):
            # The first of a chain has led to the others.
            others = bool(_FROM_OTHERS.search(found[1]))
        frame, message = found
    return DeadLog(frame, message, others, last[:500], child)


def _exception(lines: Sequence[str]) -> tuple[str, str] | None:
    """The frame to show and the message of one traceback, without its first line."""
    frames = []
    for line in lines:
        if match := _FRAME.match(line):
            frames.append(match)
        elif line and not line.startswith(" "):
            own = [one for one in frames if not LIBRARY.search(one["file"])] or frames
            place = own[-1] if own else None
            where = f"{place['function']} ({place['file']}:{place['line']})" if place else ""
            return where, line[:500]
    return None
