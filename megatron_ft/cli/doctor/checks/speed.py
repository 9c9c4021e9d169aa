"""Rates of each node, its clock, and the drain folder."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high

from megatron_ft.arena.limits import format_bytes
from megatron_ft.cli.doctor.facts import Facts, NodeFacts
from megatron_ft.cli.doctor.finding import Finding, Judged, Verdict, by_node
from megatron_ft.cli.doctor.pairs import SLOW_NODE

ARENA_SHARE = 0.5
"""An arena to which a copy has less than this share of memcpy's rate is slow."""

CLOCK_SECONDS = 1.0


def rates(facts: Facts) -> list[Finding]:
    """Copies and encoding; a node that is much slower than the others is named."""
    nodes = {n: said.rates for n, said in facts.answered.items()}
    failed = {n: r.error for n, r in nodes.items() if r.error}
    findings = [
        Finding("rates", Verdict.REFUSED, f"cannot be measured: {error}", "see the error", (node,))
        for node, error in failed.items()
    ]
    slow = _slow_work(facts)
    bad = [n for n, r in nodes.items() if 0 < r.arena < ARENA_SHARE * r.memory]
    if bad and not facts.one_machine:
        text = f"copies into the arena folder have less than {ARENA_SHARE:.0%} of memcpy's rate"
        advice = "is it on a tmpfs, without a memory limit that reclaims?"
        slow.append(Finding("rates", Verdict.WARNING, text, advice, tuple(bad)))
    shown = [r for r in nodes.values() if r.memory and not r.error]
    if shown and not findings + slow:
        least = [min(getattr(r, what) for r in shown) for what in ("memory", "arena", "encode")]
        pairs = zip(("memcpy", "into the arena", "encode"), least, strict=True)
        text = ", ".join(f"{name} {rate_text(rate)}" for name, rate in pairs if rate)
        slow.append(Finding("rates", Verdict.OK, f"at least: {text}"))
    return findings + slow


def _slow_work(facts: Facts) -> list[Finding]:
    """One finding for each node at which something is slow."""
    said: dict[str, list[str]] = {}
    for what, name in _NAMES.items():
        rates = {n: getattr(node.rates, what) for n, node in facts.answered.items()}
        for node, share in slow_nodes(rates, facts.one_machine).items():
            said.setdefault(node, []).append(f"{name} runs at {share:.0%}")
    advice = "look for other processes, a throttled processor or a missing memory channel there"
    return [
        Finding(
            "rates",
            Verdict.WARNING,
            f"{', '.join(texts)} of the typical node's rate",
            advice,
            (node,),
        )
        for node, texts in said.items()
    ]


def clocks(facts: Facts) -> list[Finding]:
    """Clocks that are off for sure, whatever the answer took on its way.

    Only logs and file times depend on them.
    """
    off = {
        node: max(clock.least, -clock.most)
        for node, clock in facts.clocks.items()
        if max(clock.least, -clock.most) > CLOCK_SECONDS
    }
    findings = [
        Finding(
            "clocks",
            Verdict.WARNING,
            f"its clock is off by {seconds:.1f} s or more",
            "run chrony or ntpd there; logs and file times mislead until then",
            (node,),
        )
        for node, seconds in off.items()
    ]
    if findings or not facts.clocks:
        return findings
    widest = max(max(abs(c.least), abs(c.most)) for c in facts.clocks.values())
    return [Finding("clocks", Verdict.OK, f"within {widest:.1f} s, as far as answers can tell")]


def drain(facts: Facts) -> list[Finding]:
    """The drain folder: written by each node, one folder for all, and how fast."""
    folder = facts.wishes.drain_dir
    if not folder:
        text = "no --drain-dir: what memory cannot restore is lost"
        return [
            Finding("drain folder", Verdict.WARNING, text, "give --drain-dir, with an interval")
        ]
    token_of = facts.drain_tokens

    def judge(item: tuple[str, NodeFacts]) -> Judged:
        node, said = item
        place = said.drain
        if place is None or place.error:
            reason = place.error if place else "it was not tried"
            return Verdict.REFUSED, f"{folder}: {reason}", "make it writable on that node"
        if not place.token or token_of.get(node) != place.token:
            text = f"{folder} is another folder than here"
            return Verdict.REFUSED, text, "mount the same file system at that path on all nodes"
        return Verdict.OK, "", ""

    known = {node: (node, said) for node, said in facts.answered.items()}
    findings = [f for f in by_node("drain folder", known, judge) if f.verdict is not Verdict.OK]
    if findings:
        return findings
    return _drain_rates(facts, folder)


def _drain_rates(facts: Facts, folder: str) -> list[Finding]:
    places = {n: said.drain for n, said in facts.answered.items() if said.drain}
    if not places:
        return []
    wishes, least = facts.wishes, min(place.rate for place in places.values())
    free = min(place.free_bytes for place in places.values())
    text = f"{folder} is one folder, written at {rate_text(least)} a node or more"
    need = (wishes.shard_bytes or 0) * wishes.ranks_per_node
    if need:
        text += f": a snapshot takes {need / least:.0f} s"
    snapshot, kept = need * len(wishes.active), wishes.drain_keep + 1
    if free < kept * snapshot:
        text += f", but only {format_bytes(free)} are free"
        if free < 2 * snapshot:
            advice = "make room for two snapshots: the new one is written before the old one goes"
            return [Finding("drain folder", Verdict.REFUSED, text, advice)]
        advice = (
            f"--drain-keep {wishes.drain_keep} needs {format_bytes(kept * snapshot)}: one more is "
            "written before the oldest goes, and with less no drain after it succeeds; what an "
            "earlier run of the job has left there counts"
        )
        return [Finding("drain folder", Verdict.WARNING, text, advice)]
    slow = slow_nodes({n: place.rate for n, place in places.items()}, facts.one_machine)
    return [Finding("drain folder", Verdict.OK, text)] + [
        Finding(
            "drain folder", Verdict.WARNING, f"writes at {share:.0%} of the typical node's rate",
            "look at its mount and its network", (node,),
        )
        for node, share in slow.items()
    ]  # fmt: skip


def slow_nodes(rates: Mapping[str, float], one_machine: bool = False) -> dict[str, float]:
    """Nodes that are slow, with their shares of the typical rate; rates of 0 are left out.

    On ``one_machine`` none is: its nodes have the same cores, and disturb each other.
    """
    known = {node: rate for node, rate in rates.items() if rate}
    if len(known) < 3 or one_machine:
        return {}
    typical = median_high(known.values())
    return {n: rate / typical for n, rate in known.items() if rate < SLOW_NODE * typical}


def rate_text(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


_NAMES = {
    "memory": "copying in memory",
    "arena": "copying into the arena folder",
    "encode": "encoding",
}
