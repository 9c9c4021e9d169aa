"""Elastic jobs: with which nodes a job continues that has lost some, or has some back.

The next recovery reshapes what is in memory to the ranks of the nodes that are chosen here
(recovery.py, restore.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import MAY_SHRINK, RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, members_of, possible_scheme
from megatron_ft.supervisor.admission import Inventories
from megatron_ft.supervisor.job_context import JobContext
from megatron_ft.supervisor.seats import Seats, choose_active
from megatron_ft.supervisor.spec import JobSpec


def shrink(job: JobContext, admitted: Inventories) -> bool:
    """Shrink the job if that is allowed and possible; True if it was done.

    Where it is allowed and impossible the reason is emitted, and nodes and memory are as before.
    """
    if job.spec.settings.on_no_spare not in MAY_SHRINK:
        return False
    members, before = job.members, len(job.members.seats.active)
    chosen, reasons = nodes_left(members.seats, job.state.record.rank_rule, admitted)
    if not chosen:
        text = "; ".join(reasons) or "no node is left"
        job.emit("not_shrunk", f"the job cannot continue with fewer nodes: {text}")
        return False
    reach("shrink.chosen")
    members.train_on(chosen)
    reach("shrink.noted")
    ranks = members.seats.ranks
    text = f"continuing with {len(chosen)} nodes instead of {before}, {ranks} ranks"
    text += f": {', '.join(chosen)}; protected by {members.seats.scheme}"
    job.emit("shrunk", text, nodes=chosen, ranks=ranks)
    return True


def nodes_left(
    seats: Seats, rule: RankRule | None, there: Iterable[str]
) -> tuple[list[str], list[str]]:
    """The nodes with which a job could continue that has lost some, and why not with more."""
    if rule is None:
        return [], ["its ranks have not said yet with how many they could"]
    usable = seats.usable(there)
    left = [
        *(n for n in seats.active if n in usable),
        *(n for n in usable if n not in seats.active),
    ]
    return fewer_nodes(seats.spec, left, len(seats.active), rule)


def nodes_without(
    seats: Seats, rule: RankRule | None, leaving: Collection[str]
) -> tuple[list[str], list[str]]:
    """The nodes with which a job continues that some shall leave, in the order of their ranks.

    None if it shall not shrink, or cannot: the reasons then say why, as ``fewer_nodes`` does.
    """
    if seats.spec.settings.on_no_spare not in MAY_SHRINK or rule is None:
        return [], []
    left = [node for node in seats.active if node not in leaving]
    return fewer_nodes(seats.spec, left, len(seats.active), rule)


def more_nodes(seats: Seats, rule: RankRule | None, there: Iterable[str]) -> list[str]:
    """The nodes that a job which has shrunk can grow to, given those that are reachable.

    Those that train stay, in their order; empty if the job stays as it is.
    """
    active, spec = seats.active, seats.spec
    if spec.settings.grow == "off" or len(active) >= spec.nodes or rule is None:
        return []
    more = [n for n in there if n not in active and n not in seats.leaving]
    chosen, _ = fewer_nodes(spec, [*active, *more], spec.nodes + 1, rule)
    return chosen if len(chosen) > len(active) and set(active) <= set(chosen) else []


def fewer_nodes(
    spec: JobSpec, left: Sequence[str], before: int, rule: RankRule, scheme: Scheme | None = None
) -> tuple[list[str], list[str]]:
    """As many of the nodes that are ``left`` as the job can continue with, fewer than ``before``.

    Nodes that come first are preferred.  If the scheme, by default the job's, has parity, some
    stripes over them keep the rule of failure domains.  ``rule`` says nothing of numbers of nodes
    that ``--shapes`` names.  Empty if no number will do; the reasons say why each larger one does
    not.  Pure.
    """
    reasons, scheme = list[str](), scheme or spec.scheme
    for count in range(min(len(left), before - 1), 0, -1):
        chosen = choose_active(left, count, spec.domains, scheme)
        against = "--shapes forbids it" if spec.shapes.get(count, ()) is None else ""
        if count not in spec.shapes:
            against = rule.against(count * spec.ranks_per_node)
        reason = against or _unprotected(chosen, spec.domains, scheme)
        if not reason:
            return chosen, reasons
        reasons.append(f"{count} nodes: {reason}")
    return [], reasons


def _unprotected(nodes: Sequence[str], domains: Domains, scheme: Scheme) -> str:
    """The reason why no stripes can be made of these nodes; empty if some can."""
    largest = max(map(len, members_of(nodes, domains).values()))
    if not scheme.parity_members or possible_scheme(len(nodes), largest, scheme) is not None:
        return ""
    return f"no stripes of their failure domains survive a loss: {', '.join(nodes)}"
