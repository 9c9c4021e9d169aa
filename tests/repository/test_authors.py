"""One author a fact: no module of the supervisor changes what belongs to a class of another one."""

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
