"""Packages import one way, in the order of CONTRIBUTING.md; modules import in no circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MEGATRON_FT = REPOSITORY / "megatron_ft"
ORDER = (
    *("core", "config", "arena", "rpc", "erasure", "smp", "trainer", "checkpoint"),
    *("launchers", "supervisor", "megatron", "deepspeed_ext", "cli"),
)
"""Each may import those before it."""

MOST_LINES = 500
MOST_FILES = 5
"""Of megatron_ft, to answer one of the questions in CONTRIBUTING.md."""


def modules(root: Path) -> dict[str, Path]:
    """All modules of the two packages by name."""
    files = chain.from_iterable(
        (root / top).rglob("*.py") for top in ("megatron_ft", "deepspeed_ext")
    )
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def imported(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """What a module imports anywhere: at its top, in functions, for types, by import_module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports name the whole module"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (word.value for word in node.args if is_text(word))


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of these modules each of them imports."""
    return {
        name: {other for other in imported(source, sources) if other in sources} - {name}
        for name, source in sources.items()
    }


def package(module: str) -> str:
    """The package of a module as in ORDER; empty for megatron_ft itself, run or imported."""
    top, _, rest = module.removesuffix(".__main__").partition(".")
    return rest.partition(".")[0] if top == "megatron_ft" else top


def upward(imports: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Imports of a package that is not before the importing one."""
    return {
        (module, other)
        for module, others in imports.items()
        for other in others
        if package(module) and package(other) and package(module) != package(other)
        if ORDER.index(package(module)) < ORDER.index(package(other))
    }


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Greatest sets of modules each of which imports every other one of its set, if by others."""
    reached = {module: reachable(imports, module) for module in imports}
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
    }
    return {circle for circle in found if len(circle) > 1}


def reachable(imports: Mapping[str, set[str]], start: str) -> set[str]:
    seen, left = set[str](), [start]
    while left:
        new = imports[left.pop()] - seen
        seen |= new
        left += new
    return seen


def our_graph() -> dict[str, set[str]]:
    return graph({name: file.read_text() for name, file in modules(REPOSITORY).items()})


def test_every_module_is_in_a_package_of_the_order() -> None:
    assert {package(name) for name in modules(REPOSITORY)} == {"", *ORDER}


def test_packages_import_only_those_before_them() -> None:
    assert upward(our_graph()) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(our_graph()) == set()


def test_what_is_installed_imports_no_tests() -> None:
    sources = {name: file.read_text() for name, file in modules(REPOSITORY).items()}
    found = {
        name
        for name, source in sources.items()
        for other in imported(source, sources)
        if other.partition(".")[0] in ("tests", "benchmarks")
    }
    assert found == set()


def test_an_upward_import_and_a_circle_are_found_wherever_they_stand() -> None:
    sources = {
        "megatron_ft.core.a": "def f():\n    from megatron_ft.cli import b\n",
        "megatron_ft.core.c": "import_module('megatron_ft.rpc.d')\n",
        "megatron_ft.rpc.d": "if TYPE_CHECKING:\n    from megatron_ft.core.c import X\n",
        "megatron_ft.cli.b": "import megatron_ft.core.a\n",
        "megatron_ft.cli.e": "from megatron_ft.cli.b import f\n",
    }
    imports = graph(sources)
    assert upward(imports) == {
        ("megatron_ft.core.a", "megatron_ft.cli.b"),
        ("megatron_ft.core.c", "megatron_ft.rpc.d"),
    }
    assert circles(imports) == {
        frozenset({"megatron_ft.core.a", "megatron_ft.cli.b"}),
        frozenset({"megatron_ft.core.c", "megatron_ft.rpc.d"}),
    }


def public_classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Modules by the name of each public class that they define."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return found


def twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of public classes that several modules define."""
    return {name: where for name, where in public_classes(sources).items() if len(where) > 1}


def test_no_two_public_classes_have_one_name() -> None:
    assert twice({name: file.read_text() for name, file in modules(REPOSITORY).items()}) == {}


def test_a_class_name_used_twice_is_found() -> None:
    text = "class Plan: ...\nclass _Own: ...\n"
    assert twice({"a": text, "b": text, "c": "class Own: ...\n"}) == {"Plan": ["a", "b"]}


def test_no_module_is_too_long() -> None:
    """A longer one answers two questions: split it by its importers or its reasons to change."""
    lengths = {name: file.read_text().count("\n") for name, file in modules(REPOSITORY).items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def answers(page: str) -> dict[str, list[str]]:
    """Files by question: the table "One question, few files" of CONTRIBUTING.md."""
    section = page.split("## One question, few files\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return {question: re.findall(r"`([\w/]+\.py)`", files) for question, files in rows[2:]}


def test_every_question_is_answered_by_few_files_that_exist() -> None:
    found = answers((REPOSITORY / "CONTRIBUTING.md").read_text())
    assert len(found) >= 6
    absent = [f for files in found.values() for f in files if not (MEGATRON_FT / f).is_file()]
    assert absent == []
    assert {q: files for q, files in found.items() if not 1 <= len(files) <= MOST_FILES} == {}
