"""The shape of supervisor/: one author a fact, and constructors that take few parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SUPERVISOR = Path(__file__).parents[2] / "megatron_ft" / "supervisor"
MUTATORS = frozenset(
    "add append clear difference_update discard extend insert pop popitem remove set setdefault "
    "update".split()
)
"""Methods of containers and events that change them."""


def owned(tree: ast.Module) -> set[str]:
    """Names of the attributes that classes of this module declare or assign to themselves."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            names.update(one.id for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def changed(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, whose items are, or whose content a method changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            while isinstance(node, ast.Subscript):
                node = node.value
            if isinstance(node, ast.Attribute):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS and isinstance(node.func.value, ast.Attribute):
                yield node.func.value


def foreign(source: str) -> list[str]:
    """Changes of attributes that no class of this module has, as they are written."""
    tree = ast.parse(source)
    known = owned(tree)
    return [ast.unparse(one) for one in changed(tree) if one.attr not in known]


def test_the_supervisor_has_one_author_a_fact() -> None:
    found = {path.name: foreign(path.read_text()) for path in sorted(SUPERVISOR.glob("*.py"))}
    assert not {name: some for name, some in found.items() if some}


@pytest.mark.parametrize(
    "line",
    ["other.fact = 1", "other.fact += 1", "other.facts['a'] = 1", "self.other.facts.clear()"],
)
def test_another_author_is_found(line: str) -> None:
    source = f"class A:\n  def f(self, other): {line}"
    assert foreign(source)
    assert not foreign(f"class B:\n  fact: int\n  facts: dict\n\n{source}")


MOST_ARGUMENTS = 7


def constructors(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each class with the number of arguments that make one.

    A frozen dataclass, a NamedTuple or a Struct is a value: it names the facts of one thing, and
    holds no other object that it calls.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = [ast.unparse(one) for one in node.decorator_list]
        if any(one.startswith("dataclass") and "frozen=True" not in one for one in decorators):
            given = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            texts = [ast.unparse(one) for one in given]
            hidden = ("ClassVar", "init=False")
            yield node.name, sum(not any(word in text for word in hidden) for text in texts)
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                yield node.name, len([*one.args.args, *one.args.kwonlyargs]) - 1


def crowded(source: str) -> list[str]:
    return [name for name, count in constructors(ast.parse(source)) if count > MOST_ARGUMENTS]


def test_no_constructor_of_the_supervisor_takes_more_than_seven_arguments() -> None:
    found = {path.name: crowded(path.read_text()) for path in sorted(SUPERVISOR.glob("*.py"))}
    assert not {name: some for name, some in found.items() if some}


@pytest.mark.parametrize(
    ("source", "many"),
    [
        ("class A:\n  def __init__(self, a, b, c, d, e, f, *, g, h): ...", True),
        ("class A:\n  def __init__(self, a, b, c, d, e, f, *, g): ...", False),
        ("@dataclass\nclass A:" + "".join(f"\n  a{i}: int" for i in range(8)), True),
        ("@dataclass(kw_only=True)\nclass A:" + "".join(f"\n  a{i}: int" for i in range(8)), True),
        ("@dataclass(frozen=True)\nclass A:" + "".join(f"\n  a{i}: int" for i in range(8)), False),
        (
            "@dataclass\nclass A:"
            + "".join(f"\n  a{i}: int = field(init=False)" for i in range(8)),
            False,
        ),
    ],
)
def test_a_crowded_constructor_is_found(source: str, many: bool) -> None:
    assert bool(crowded(source)) is many
