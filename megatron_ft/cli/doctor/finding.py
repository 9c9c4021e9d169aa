"""One line of the doctor's report, and how lines are merged, printed and turned into JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

WIDTH = 100
_MARGIN = 23


class Verdict(str, Enum):
    """Worse is later: a warning is for people to read, what is refused would fail the job."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"


class Finding(NamedTuple):
    """What was looked at, how it is, and what to do about it; ``nodes`` empty means all."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""
    nodes: tuple[str, ...] = ()


Judged = tuple[Verdict, str, str]
"""Verdict, text and advice of one node."""

T = TypeVar("T")


def by_node(
    check: str, facts: Mapping[str, T], judge: Callable[[T], Judged], fine: str = ""
) -> list[Finding]:
    """One finding for all nodes of which the same can be said, the worst first.

    Nodes that are fine are one finding with the text ``fine`` if that is given.
    """
    groups: dict[Judged, list[str]] = {}
    for node, said in facts.items():
        verdict, text, advice = judge(said)
        text = fine if verdict is Verdict.OK and fine else text
        groups.setdefault((verdict, text, advice), []).append(node)
    order = list(Verdict)
    ranked = sorted(groups.items(), key=lambda group: -order.index(group[0][0]))
    everywhere = len(groups) == 1
    return [
        Finding(check, verdict, text, advice, () if everywhere else tuple(nodes))
        for (verdict, text, advice), nodes in ranked
    ]


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict; ok if there are no findings."""
    order = list(Verdict)
    return max((f.verdict for f in findings), key=order.index, default=Verdict.OK)


def render(findings: Sequence[Finding]) -> str:
    """The report for people."""
    return "\n".join(line for finding in findings for line in _lines(finding))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for programs; keys as the fields of Finding."""
    rows = [{**f._asdict(), "verdict": f.verdict.value, "nodes": list(f.nodes)} for f in findings]
    return {"verdict": worst(findings).value, "findings": rows}


def _lines(finding: Finding) -> list[str]:
    where = f"{', '.join(finding.nodes)}: " if finding.nodes else ""
    head = f"{finding.verdict.value:<8} {finding.check:<14}"
    indent = " " * _MARGIN
    text = textwrap.fill(
        where + finding.text, WIDTH, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    lines = (f"{head:<{_MARGIN}}" + text[_MARGIN:]).splitlines()
    if finding.advice:
        lines += textwrap.wrap(
            "-> " + finding.advice, WIDTH, initial_indent=indent, subsequent_indent=indent + "   ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines
