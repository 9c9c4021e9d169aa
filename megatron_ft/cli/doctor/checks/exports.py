"""Folders of exports: written from every node, locked, and no other job's."""

from __future__ import annotations

from functools import partial

from megatron_ft.cli.doctor.facts import ExportFolder, ExportPlace, Facts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node

CHECK = "export folder"
_UNTRIED = ExportPlace(error="it was not tried")
_ALONE = "see to it that no other job exports there"


def folders(facts: Facts) -> list[Finding]:
    """Where exports go, one after the other; nothing if there are none."""
    return [finding for here in facts.exports for finding in _folder(facts, here)]


def _folder(facts: Facts, here: ExportFolder) -> list[Finding]:
    name = f"{here.flag} {here.folder}"
    fine = f"{name} is one folder, which can be locked; no other job exports there"
    if here.holder:
        text = f"{name}: {here.holder} exports there"
        advice = "give one of them another folder, or wait until the other has ended"
        return [Finding(CHECK, Verdict.REFUSED, text, advice)]
    places = {n: said.exports.get(here.folder, _UNTRIED) for n, said in facts.answered.items()}
    findings = by_node(CHECK, places, partial(_judge, name), fine)
    bad = [finding for finding in findings if finding.verdict is not Verdict.OK]
    if here.problem and all(finding.verdict is not Verdict.REFUSED for finding in bad):
        text = f"{name} cannot be locked ({here.problem})"
        return [Finding(CHECK, Verdict.WARNING, text, _ALONE)]
    return bad or findings


def _judge(name: str, place: ExportPlace) -> Judged:
    if place.error:
        return Verdict.REFUSED, f"{name}: {place.error}", "make it writable on that node"
    if not place.same:
        text = f"{name} is another folder than here"
        return Verdict.REFUSED, text, "mount the same file system at that path on all nodes"
    if place.problem:
        return Verdict.WARNING, f"{name} cannot be locked there ({place.problem})", _ALONE
    if not place.locked:
        text = f"{name}: a lock that is taken here is not seen there"
        advice = (
            "mount it with locks for all machines (NFS: neither nolock nor local_lock; Lustre: "
        )
        return Verdict.WARNING, text, f"{advice}flock), or {_ALONE}"
    return Verdict.OK, "", ""
