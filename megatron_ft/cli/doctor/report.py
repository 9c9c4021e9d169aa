"""Lines of the doctor's report: how one is made, grouped by node, printed, and turned into JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

WIDTH = 100
_MARGIN = 23


class Severity(str, Enum):
    """Verdicts, the worst last: a warning is for people to read, a refusal would fail the job."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class Finding(NamedTuple):
    """One line of the report: verdict, reason and remedy; ``nodes`` empty means all."""

    verdict: Severity
    text: str
    advice: str = ""
    nodes: tuple[str, ...] = ()
    check: str = ""


def ok(text: str) -> Finding:
    return Finding(Severity.OK, text)


def warn(text: str, advice: str, *nodes: str) -> Finding:
    return Finding(Severity.WARNING, text, advice, nodes)


def refuse(text: str, advice: str, *nodes: str) -> Finding:
    return Finding(Severity.REFUSED, text, advice, nodes)


def by_node(facts: Mapping[str, T], judge: Callable[[T], Finding]) -> list[Finding]:
    """One line for all nodes with the same finding, the worst first."""
    groups: dict[Finding, list[str]] = {}
    for node, said in facts.items():
        groups.setdefault(judge(said), []).append(node)
    everywhere = len(groups) == 1
    return [
        finding._replace(nodes=() if everywhere else tuple(nodes))
        for finding, nodes in sorted(groups.items(), key=lambda group: -group[0].verdict.rank)
    ]


def worst(findings: Iterable[Finding]) -> Severity:
    verdicts = (finding.verdict for finding in findings)
    return max(verdicts, key=lambda verdict: verdict.rank, default=Severity.OK)


def render(findings: Sequence[Finding]) -> str:
    return "\n".join(line for finding in findings for line in _lines(finding))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    rows = [{**f._asdict(), "verdict": f.verdict.value, "nodes": list(f.nodes)} for f in findings]
    return {"verdict": worst(findings).value, "findings": rows}


def _lines(finding: Finding) -> list[str]:
    where = f"{', '.join(finding.nodes)}: " if finding.nodes else ""
    head = f"{finding.verdict.value:<8} {finding.check:<14}"
    lines = _folded(where + finding.text, "") or [""]
    lines[0] = f"{head:<{_MARGIN}}" + lines[0][_MARGIN:]
    return lines + (_folded(f"-> {finding.advice}", "   ") if finding.advice else [])


def _folded(text: str, hanging: str) -> list[str]:
    indent = " " * _MARGIN
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
