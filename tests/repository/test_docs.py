"""The documentation names what exists, is plain English, and its site builds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NAME = re.compile(r"\btest_[a-z0-9_]+(?:\.py\b)?")
_QUOTED = re.compile(r"`(test_[a-z0-9_]+\.py)`, \"([^\"]+)\"")
"""A file, and words of the name of one of its tests."""


def functions(folder: Path) -> dict[str, set[str]]:
    """Names of test functions by file."""
    found = {}
    for path in folder.rglob("test_*.py"):
        names = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        found[path.name] = set(names)
    return found


def absent(page: str, tests: dict[str, set[str]]) -> list[str]:
    """The names of files and functions in a page that no test has."""
    known = set(tests) | {name for names in tests.values() for name in names}
    # A file may be named without its ending, as a module or on a command line.
    known |= {name.removesuffix(".py") for name in tests}
    named = [name for name in _NAME.findall(page) if name not in known]
    quoted = [
        f"{file}, {words!r}"
        for file, words in _QUOTED.findall(page)
        if not any(words.replace(" ", "_") in name for name in tests.get(file, ()))
    ]
    return named + quoted


_FILE = re.compile(r"`((?:[a-z_]+/)+[\w-]+\.(?:py|sh|sbatch))`")
FRAMEWORKS = ("megatron/",)
"""Folders of files in the sources of others."""


def absent_files(page: str, files: set[str]) -> list[str]:
    """Files in a page that are in no folder of the repository."""
    named = [name for name in _FILE.findall(page) if not name.startswith(FRAMEWORKS)]
    return [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]


def test_files_that_the_documentation_names_exist() -> None:
    skipped = {".git", ".venv"}
    files = {
        str(path.relative_to(ROOT))
        for top in ROOT.iterdir()
        if top.is_dir() and top.name not in skipped
        for path in top.rglob("*.*")
    }
    found = {page.name: absent_files(page.read_text(), files) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_a_file_that_is_gone_is_found() -> None:
    page = "`core/a.py`, `core/b.py`, `a.py` and `megatron/training/arguments.py`"
    assert absent_files(page, {"megatron_ft/core/a.py"}) == ["core/b.py"]


def test_tests_that_the_documentation_names_exist() -> None:
    tests = functions(ROOT / "tests")
    found = {page.name: absent(page.read_text(), tests) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_a_name_that_no_test_has_is_found() -> None:
    tests = {"test_a.py": {"test_it_works"}}
    page = '`test_a.py`, "it works"; `test_a.py`, "it fails"; `test_b.py`; `test_it_worked[x]`'
    assert absent(page, tests) == ["test_b.py", "test_it_worked", "test_a.py, 'it fails'"]


DOCS = ROOT / "docs"

LONGEST_SENTENCE = 35
"""Words; we aim at 25."""

BANNED = re.compile(
    r"\b(goes? on from|(?:is|are|was|were) told(?! apart)|sa(?:id|ys) so|a life|whoever)\b"
    r"|^(?:What|Who|Whatever) [^?]*[.]$",
    re.IGNORECASE,
)
"""Riddles, and sentences whose subject is a clause."""


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page, without code, tables, headings and the targets of links."""
    page = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    lines = [line for line in page.splitlines() if not re.match(r"\s*(?:[|#]|:::|--8<--)", line)]
    # An item of a list is a sentence, and so is the line that leads to the list.
    text = "\n".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", line) for line in lines)
    for paragraph in re.split(r"\n\s*\n|:\n", text):
        yield from re.split(r"(?<=[.!?;:])\s+(?=\S)", " ".join(paragraph.split()))


def unclear(page: str) -> list[str]:
    """The sentences of a page that are too long or have a banned phrase."""
    return [
        one
        for one in sentences(page)
        if len(one.split()) > LONGEST_SENTENCE or BANNED.search(one.strip("*_ "))
    ]


def test_pages_are_plain_english() -> None:
    found = {
        path.relative_to(DOCS).as_posix(): bad
        for path in sorted(DOCS.rglob("*.md"))
        if (bad := unclear(path.read_text()))
    }
    assert found == {}


def test_unclear_sentences_are_found() -> None:
    page = "A short one. What it holds is lost.\n\n- It is told what to do.\n\n" + "word " * 36
    assert len(unclear(page)) == 3
    assert unclear("| What it is | told |\n\n```\nWhat is it.\n```\n\nWhat is it?") == []


def texts(source: str) -> Iterator[str]:
    """The texts of a program; a text with values is cut where a value stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_runbook_are_in_the_code() -> None:
    files = [*(ROOT / "megatron_ft").rglob("*.py"), *(ROOT / "deepspeed_ext").rglob("*.py")]
    known = "\n".join(text for path in files for text in texts(path.read_text()))
    page = (DOCS / "how-to" / "runbook.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece.strip() for text in quoted for piece in text.split("...")]
    assert len(pieces) > 80
    assert [piece for piece in pieces if piece not in known] == []


README = ROOT / "README.md"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Pages that are not in the navigation, links and anchors that lead nowhere are warnings."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([\w-]+))?\)", README.read_text())
    assert links
    for path, anchor in links:
        target = ROOT / path if path else README
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
