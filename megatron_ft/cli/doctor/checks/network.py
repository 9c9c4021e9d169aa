"""The transport between every pair of nodes: does it work, at which rate, who is slow."""

from __future__ import annotations

from megatron_ft.cli.doctor.checks.speed import rate_text
from megatron_ft.cli.doctor.facts import Facts, WorldFacts
from megatron_ft.cli.doctor.finding import Finding, Verdict
from megatron_ft.cli.doctor.pairs import judge_pairs

_INSTALL = "snapshots would stay on their node: see what is said, and the network between nodes"
_SLOWER = "encrypted and slower: install mpi4py for your cluster's MPI, or say --transport tcp"


def world(facts: Facts) -> list[Finding]:
    """The world over all nodes."""
    found = facts.world
    if found is None:
        return []
    if found.error:
        return _no_world(facts, found)
    rank = next(iter(found.joined.values()))
    libraries = sorted({rank.library for rank in found.joined.values()})
    text = " and ".join(libraries)
    text += f", started by {found.launcher}" if found.launcher else ""
    text += f"; {rank.fabric}" if rank.fabric else "; its settings name no fabric"
    if found.tcp:
        return [_over_tcp(found, " and ".join(libraries)), *pairs(facts)]
    if len(libraries) > 1:
        advice = "take one MPI on all nodes"
        return [Finding("mpi", Verdict.WARNING, text, advice), *pairs(facts)]
    return [Finding("mpi", Verdict.OK, text), *pairs(facts)]


def pairs(facts: Facts) -> list[Finding]:
    """Rates between nodes."""
    assert facts.world is not None
    nodes = list(facts.world.joined)
    if len(nodes) < 2:
        return []
    verdict = judge_pairs(nodes, facts.world.rates, facts.one_machine)
    typical = rate_text(verdict.typical)
    findings = [_refused("gives no answer, to nobody", (node,)) for node in verdict.broken]
    findings += [_refused("no answer between them", pair) for pair in verdict.broken_links]
    findings += [
        _slow(f"{share:.0%} of the typical rate of {typical}, with every partner", (node,))
        for node, share in verdict.slow.items()
    ]
    findings += [
        _slow(f"{share:.0%} of the typical rate of {typical} between them", pair)
        for pair, share in verdict.slow_links.items()
    ]
    if findings:
        return findings
    least = rate_text(min(facts.world.rates.values()))
    text = f"all {len(facts.world.rates)} pairs of nodes work, at {least} to {typical} a direction"
    return [Finding("pairs", Verdict.OK, text)]


def _over_tcp(found: WorldFacts, libraries: str) -> Finding:
    if found.no_mpi:
        text = f"encoders use {libraries}, because no MPI can be loaded: {found.no_mpi}"
        return Finding("mpi", Verdict.WARNING, text, _SLOWER)
    return Finding("mpi", Verdict.OK, f"encoders use {libraries}, as --transport says")


def _no_world(facts: Facts, found: WorldFacts) -> list[Finding]:
    kind = "TCP" if found.tcp else "MPI"
    if not found.broken:
        text = f"worlds of two nodes work, one of all does not: {found.error}"
        return [Finding("mpi", Verdict.REFUSED, text, f"see what {kind} says")]
    text = f"no {kind} world with it: {found.error}"
    if len(found.broken) == len(facts.answered):
        return [Finding("mpi", Verdict.REFUSED, f"no {kind} world: {found.error}", _INSTALL)]
    return [Finding("mpi", Verdict.REFUSED, text, _INSTALL, found.broken)]


def _refused(text: str, nodes: tuple[str, ...]) -> Finding:
    return Finding("pairs", Verdict.REFUSED, text, "take it out, or mend its network", nodes)


def _slow(text: str, nodes: tuple[str, ...]) -> Finding:
    advice = "look at its link, cable and neighbours; a stripe is as fast as its slowest node"
    return Finding("pairs", Verdict.WARNING, text, advice, nodes)
