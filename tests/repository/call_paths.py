"""Files that one opens to follow a path through the code, by the types that mypy infers.

A path is a list of legs, one for each process that it crosses.  A leg starts in one function and
ends in another one.  Its files are those of all functions on some way between the two, over calls
and over functions that are handed on as values.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

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
