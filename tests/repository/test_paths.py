"""The number of files that one opens to follow the main paths, by the types that mypy infers.

A path is a list of legs, one for each process that it crosses.  A leg starts in one function and
ends in another one.  Its files are those of all functions on some way between the two, over calls
and over functions that are handed on as values.  CONTRIBUTING.md names the first files of each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from mypy.build import BuildResult, build
from mypy.modulefinder import BuildSource
from mypy.nodes import (
    Decorator,
    Expression,
    FuncDef,
    MemberExpr,
    MypyFile,
    OverloadedFuncDef,
    TypeInfo,
)
from mypy.options import Options
from mypy.traverser import NameAndMemberCollector
from mypy.types import CallableType, Instance, Type, UnionType, get_proper_type

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("megatron_ft", "deepspeed_ext")


class CallGraph(NamedTuple):
    """Functions by full name: those that each refers to, and the file of each."""

    calls: Mapping[str, set[str]]
    files: Mapping[str, str]


def analysed(root: Path) -> CallGraph:
    """The calls of both packages; what else they import is not looked at."""
    options = Options()
    options.python_version = sys.version_info[:2]
    options.export_types = options.preserve_asts = True
    options.follow_imports = "skip"
    options.ignore_errors = options.check_untyped_defs = True
    options.incremental = False
    options.mypy_path = [str(root)]
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    sources = [
        BuildSource(str(file), name.removesuffix(".__init__"))
        for file, name in zip(files, names, strict=True)
    ]
    return _graph(build(sources, options), root)


def classes_of(kind: Type | None) -> Iterator[TypeInfo]:
    """Classes whose instances a value of this type can be."""
    kind = None if kind is None else get_proper_type(kind)
    if isinstance(kind, UnionType):
        for item in kind.items:
            yield from classes_of(item)
    elif isinstance(kind, Instance):
        yield kind.type
    elif isinstance(kind, CallableType) and kind.is_type_obj():
        yield kind.type_object()


def referred(function: FuncDef, types: Mapping[Expression, Type]) -> Iterator[str]:
    """Full names of what a function names: functions, classes' constructors, methods."""
    visitor = NameAndMemberCollector()
    function.accept(visitor)
    for one in (*visitor.name_exprs, *visitor.member_exprs):
        if isinstance(one.node, TypeInfo):
            yield from method(one.node, "__init__")
        elif one.fullname:
            yield one.fullname
        if isinstance(one, MemberExpr):
            for owner in classes_of(types.get(one.expr)):
                yield from method(owner, one.name)


def method(owner: TypeInfo, name: str) -> Iterator[str]:
    """The full name of a class's method, which a base may define."""
    for base in owner.mro:
        if name in base.names:
            yield f"{base.fullname}.{name}"
            return


def functions(tree: MypyFile) -> Iterator[FuncDef]:
    """Functions of a module and methods of its classes; nested ones are part of their function.

    Constructors that mypy makes for data classes are left out: nobody opens a file for them.
    """
    for _, symbol, _ in tree.local_definitions():
        if symbol.plugin_generated:
            continue
        node = symbol.node.func if isinstance(symbol.node, Decorator) else symbol.node
        if isinstance(node, FuncDef):
            yield node
        elif isinstance(node, OverloadedFuncDef):
            yield from (item.func for item in node.items if isinstance(item, Decorator))


def _graph(result: BuildResult, root: Path) -> CallGraph:
    calls, files = dict[str, set[str]](), dict[str, str]()
    for tree in result.files.values():
        path = Path(tree.path).absolute()
        if not any(path.is_relative_to(root / package) for package in PACKAGES):
            continue
        for function in functions(tree):
            found = calls.setdefault(function.fullname, set())
            found.update(referred(function, result.types))
            files[function.fullname] = str(path.relative_to(root))
    known = {name: found & calls.keys() for name, found in calls.items()}
    return CallGraph(known, files)


def find(graph: CallGraph, name: str) -> str:
    """The full name of the only function whose name ends like this."""
    (found,) = (full for full in graph.calls if full == name or full.endswith(f".{name}"))
    return found


def files_of(graph: CallGraph, names: Iterable[str]) -> set[str]:
    return {graph.files[name] for name in names}


def reached(graph: CallGraph, start: str, stops: Collection[str] = ()) -> set[str]:
    """Functions that ``start`` leads to, itself included; ``stops`` are not entered."""
    found, left = {start}, [start]
    while left:
        if (name := left.pop()) not in stops:
            new = graph.calls[name] - found
            found |= new
            left += new
    return found


def between(graph: CallGraph, start: str, end: str) -> set[str]:
    """Functions on some way from ``start`` to ``end``; empty if none leads there."""
    callers = {name: set[str]() for name in graph.calls}
    for name, called in graph.calls.items():
        for one in called:
            callers[one].add(name)
    return reached(graph, start) & reached(graph._replace(calls=callers), end)


Leg = tuple[str, str]

SAVE = ("SnapshotManager.save", ("SnapshotManager._begin", "SnapshotManager.prepare"))
"""The start of the path, and functions that it does not enter: each is a question of its own."""
FLOOR = ("megatron_ft/core/", "megatron_ft/config/", "megatron_ft/arena/")
"""Packages that the path of ``save()`` uses and does not enter."""

COMMIT: Sequence[Leg] = (
    ("CaptureController._on_sealed", "TrainerClient.send"),
    ("LocalServer._handle", "NodeMachine.handle"),
    ("NodeMachine._sealed", "ShardSlots.seal"),
    ("LocalServer._handle", "EventPublisher._to_coordinator"),
    ("SmpLink._read", "SmpLink.receive"),
    ("EventSubscription.take", "EventSubscription.take"),
    ("Fleet.take", "Fleet.take"),
    ("SnapshotPump._on_event", "SnapshotCycle._commit"),
    ("SnapshotPump._on_event", "SmpLink.ask"),
    ("ControlServer._handle", "NodeMachine.handle"),
    ("NodeMachine._commit", "ShardSlots.commit"),
    ("ControlServer._handle", "Arena.write_slot"),
)
NODE_LOST: Sequence[Leg] = (
    ("Supervisor._train", "Incarnation.run"),
    ("Incarnation.run", "Membership.until_silence"),
    ("Membership.until_silence", "Fleet.silent_nodes"),
    ("Supervisor._train", "Recovery.run"),
    ("Recovery.run", "Membership.replace_lost"),
    ("Membership.replace_lost", "Seats.replacements"),
    ("Recovery.run", "decide.decide"),
    ("Recovery.run", "supervisor.restore.rebuild"),
    ("supervisor.restore.rebuild", "SmpLink.ask"),
    ("ControlServer._handle", "NodeMachine.handle"),
    ("NodeMachine._rebuild", "NodeMachine._order"),
    ("worker.serve", "erasure.rebuild.rebuild"),
    ("erasure.rebuild.rebuild", "Codec.kernel"),
    ("SnapshotManager.load", "trainer.restore.restore_shard"),
    ("trainer.restore.restore_shard", "VerifiedCopy.run"),
)
PATHS = {
    "A node died: what is restored, and by which steps?": (NODE_LOST, 22),
    "How does a sealed shard reach the coordinator's decision?": (COMMIT, 14),
}
"""Legs by the question of CONTRIBUTING.md, and the most files that they may take."""
MOST_FOR_SAVE = 23


@pytest.fixture(scope="module")
def graph() -> CallGraph:
    return analysed(REPOSITORY)


def named(question: str) -> set[str]:
    """The files that CONTRIBUTING.md names for a question."""
    (row,) = (
        line
        for line in (REPOSITORY / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith(f"| {question} |")
    )
    return {f"megatron_ft/{name}" for name in re.findall(r"`([\w/]+\.py)`", row)}


@pytest.mark.parametrize("question", PATHS)
def test_a_path_takes_few_files(graph: CallGraph, question: str) -> None:
    legs, most = PATHS[question]
    found = set[str]()
    for start, end in legs:
        functions = between(graph, find(graph, start), find(graph, end))
        assert functions, f"nothing leads from {start} to {end}"
        found |= files_of(graph, functions)
    assert len(found) <= most, sorted(found)
    assert named(question) <= found


def test_save_takes_few_files(graph: CallGraph) -> None:
    start, others = SAVE
    stops = {find(graph, name) for name in others}
    stops |= {name for name, file in graph.files.items() if file.startswith(FLOOR)}
    found = files_of(graph, reached(graph, find(graph, start), stops) - stops)
    assert len(found) <= MOST_FOR_SAVE, sorted(found)
    assert named("What does `save()` do?") <= found


def test_a_way_is_found_and_no_other() -> None:
    calls = {"a": {"b", "c"}, "b": {"d"}, "c": set[str](), "d": set[str](), "e": {"d"}}
    graph = CallGraph(calls, {name: f"{name}.py" for name in calls})
    assert between(graph, "a", "d") == {"a", "b", "d"}
    assert not between(graph, "c", "d")
    assert reached(graph, "a", {"b"}) == {"a", "b", "c"}
