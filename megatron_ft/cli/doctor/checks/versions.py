"""Versions: supported ones, and the same on all nodes."""

from __future__ import annotations

from megatron_ft.cli.doctor.facts import Facts, TrainerFacts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node
from megatron_ft.core.required_names import version_numbers
from megatron_ft.core.supported import DEEPSPEED, MEGATRON, Releases

OLDEST_PYTHON = (3, 10)


def frameworks(facts: Facts) -> list[Finding]:
    """What a trainer's Python has, of what the job uses."""
    wishes = facts.wishes
    wanted = [r for r, used in ((MEGATRON, wishes.megatron), (DEEPSPEED, wishes.deepspeed)) if used]

    def judge(said: TrainerFacts) -> Judged:
        problems = [_python(said), _torch(said), *(_framework(said, r) for r in wanted)]
        found = max(problems, key=lambda judged: list(Verdict).index(judged[0]))
        if found[0] is not Verdict.OK:
            return found
        return Verdict.OK, ", ".join(text for _, text, _ in problems), ""

    findings = by_node("versions", facts.as_trainers, judge)
    if not wishes.command_python:
        text = "no word of the training command is a Python: versions are of this one"
        findings.append(Finding("versions", Verdict.WARNING, text, "write `python SCRIPT` in it"))
    return findings


def same(facts: Facts) -> list[Finding]:
    """All nodes must run the same code of ours, and should run the same of others."""
    codes = {said.code for said in facts.answered.values()}
    if len(codes) > 1:
        shown = _groups({node: said.code for node, said in facts.answered.items()})
        text = f"megatron_ft differs between nodes: {shown}"
        return [Finding("same code", Verdict.REFUSED, text, "install one version everywhere")]
    names = {name for said in facts.as_trainers.values() for name in said.packages}
    trainers = facts.as_trainers.items()
    found = {"Python": {node: said.python for node, said in trainers}}
    for name in sorted(names):
        found[name] = {node: said.packages.get(name, "none") for node, said in trainers}
    differing = [f"{name} ({_groups(by)})" for name, by in found.items() if len({*by.values()}) > 1]
    if differing:
        text = f"versions differ between nodes: {'; '.join(differing)}"
        return [Finding("same code", Verdict.WARNING, text, "install one version everywhere")]
    return [Finding("same code", Verdict.OK, "megatron_ft and packages agree on all nodes")]


def _python(said: TrainerFacts) -> Judged:
    if version_numbers(said.python) < OLDEST_PYTHON:
        text = f"the trainer's Python is {said.python} ({said.executable})"
        return Verdict.REFUSED, text, "take Python 3.10 or newer"
    return Verdict.OK, f"Python {said.python}", ""


def _torch(said: TrainerFacts) -> Judged:
    version = said.packages.get("torch")
    if version is None:
        text = f"no torch in the trainer's Python {said.executable}"
        return Verdict.REFUSED, text, "install the torch build for your hardware"
    return Verdict.OK, f"torch {version}", ""


def _framework(said: TrainerFacts, releases: Releases) -> Judged:
    version = said.packages.get(releases.distribution)
    if version is None:
        text = f"{releases.name} is not installed as {releases.distribution} in {said.executable}"
        if releases is MEGATRON:
            # A checkout on PYTHONPATH has no version that can be read without importing it.
            return Verdict.WARNING, text, f"a checkout must be one of {releases.working}"
        return Verdict.REFUSED, text, f"install {releases.working}"
    text = f"{releases.distribution} {version}"
    if version_numbers(version) < releases.oldest:
        return Verdict.REFUSED, f"{text} is too old", f"install {releases.working}"
    return Verdict.OK, text, ""


def _groups(values: dict[str, str]) -> str:
    """``1.0 on n0, n1; 2.0 on n2``."""
    found: dict[str, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in found.items())
