"""The documentation is plain English: no sentence of many words, no phrase that is a riddle.

The messages that the runbook quotes are those of the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
