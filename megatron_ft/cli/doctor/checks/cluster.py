"""Nodes that answer, spares, failure domains, and what Slurm does when a node is lost."""

from __future__ import annotations

from megatron_ft.cli.doctor.facts import Facts
from megatron_ft.cli.doctor.finding import Finding, Verdict
from megatron_ft.cli.doctor.slurm import IN_SCRIPT, MISSING, SET
from megatron_ft.core.errors import ProtectionError
from megatron_ft.erasure.domains import check_domains
from megatron_ft.supervisor.placement import describe_domains


def reachable(facts: Facts) -> list[Finding]:
    """Every node must have answered."""
    lost = [(node, said) for node, said in facts.nodes.items() if isinstance(said, str)]
    if not lost:
        names = facts.wishes.nodes
        hosts = len({said.machine for said in facts.answered.values()})
        text = f"all {len(names)} nodes answer, on {hosts} machine{'s' if hosts > 1 else ''}"
        return [Finding("nodes", Verdict.OK, text)]
    advice = "repair the node or leave it out; if all fail alike, see whether this package is there"
    return [
        Finding("nodes", Verdict.REFUSED, f"the probe failed: {reason}", advice, (node,))
        for node, reason in lost
    ]


def spares(facts: Facts) -> list[Finding]:
    """Without a spare a lost node ends the job, or its memory at least."""
    wishes = facts.wishes
    if wishes.spares:
        return [Finding("spares", Verdict.OK, f"in reserve: {', '.join(wishes.spares)}")]
    text = "no spare: the job stops when a node is lost"
    return [Finding("spares", Verdict.WARNING, text, "start with --spares 1 or more")]


def protection(facts: Facts) -> list[Finding]:
    """Stripes over the nodes that train, by failure domain."""
    wishes = facts.wishes
    if not wishes.scheme.parity_members:
        text = "--protect none: the loss of one node loses the job's memory"
        return [Finding("protection", Verdict.WARNING, text, "take rs:3+1, say")]
    try:
        check_domains(wishes.active, wishes.domains, wishes.scheme)
    except ProtectionError as error:
        said, _, advice = str(error).partition(". ")
        return [Finding("protection", Verdict.REFUSED, said, advice or "take fewer members")]
    text = describe_domains(wishes.active, wishes.nodes, wishes.domains, wishes.scheme)
    source = wishes.domains_from or "no --failure-domains, each node is alone"
    if not wishes.domains:
        text = f"{wishes.scheme} over {len(wishes.active)} nodes"
    return [Finding("protection", Verdict.OK, f"{text} ({source})")]


def slurm(facts: Facts) -> list[Finding]:
    """With Slurm's defaults the loss of a node kills the whole job."""
    if facts.no_kill is None:
        return []
    if facts.no_kill == SET:
        return [Finding("slurm", Verdict.OK, "--no-kill is set: the job outlives a node")]
    advice = "put `#SBATCH --no-kill` into the batch script"
    if facts.no_kill == MISSING:
        text = "--no-kill is not set: Slurm kills the whole job when a node is lost"
        return [Finding("slurm", Verdict.REFUSED, text, advice)]
    if facts.no_kill == IN_SCRIPT:
        text = "unknown: --no-kill is in the batch script, but Slurm does not show sbatch's command"
        advice = "see that it was submitted without --no-kill=off"
        return [Finding("slurm", Verdict.WARNING, text, advice)]
    text = "--no-kill is not in the batch script, and Slurm does not tell how it was submitted"
    return [Finding("slurm", Verdict.WARNING, text, advice)]
