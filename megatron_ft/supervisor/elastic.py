"""Elastic jobs: with which nodes a job continues that has lost some, or has some back.

The next recovery reshapes what is in memory to the ranks of the nodes that are chosen here
(recovery.py, restore.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.core.fault_points import reach
from megatron_ft.core.identity import MAY_SHRINK, RankRule
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, members_of, possible_scheme
from megatron_ft.supervisor.admission import Inventories
from megatron_ft.supervisor.events import Observers
from megatron_ft.supervisor.job_state import JobState
from megatron_ft.supervisor.membership import Membership
from megatron_ft.supervisor.placement import choose_active
from megatron_ft.supervisor.spec import JobSpec, Shapes


def shrink(
    spec: JobSpec,
    state: JobState,
    members: Membership,
    observers: Observers,
    admitted: Inventories,
) -> bool:
    """Have the job continue with fewer nodes if it shall and can; whether it does.

    If it shall and cannot, the reason is emitted, and nodes and memory are as before.
    """
    if spec.settings.on_no_spare not in MAY_SHRINK:
        return False
    chosen, reasons = nodes_left(spec, state, members, admitted)
    if not chosen:
        text = "; ".join(reasons) or "no node is left"
        observers.emit("not_shrunk", f"the job cannot continue with fewer nodes: {text}")
        return False
    reach("shrink.chosen")
    before = len(members.active)
    members.train_on(chosen)
    reach("shrink.noted")
    text = f"continuing with {len(chosen)} nodes instead of {before}, {members.ranks} ranks"
    observers.emit(
        "shrunk",
        f"{text}: {', '.join(chosen)}; protected by {members.scheme}",
        nodes=chosen,
        ranks=members.ranks,
    )
    return True


def nodes_left(
    spec: JobSpec, state: JobState, members: Membership, admitted: Inventories
) -> tuple[list[str], list[str]]:
    """The nodes with which a job could continue that has lost some, and why not with more."""
    active, rule = members.active, state.record.rank_rule
    if rule is None:
        return [], ["its ranks have not said yet with how many they could"]
    there = members.usable(admitted)
    left = [*(n for n in active if n in there), *(n for n in there if n not in active)]
    return _fewer_of(spec, left, len(active), rule)


def nodes_without(
    spec: JobSpec, state: JobState, members: Membership, leaving: Collection[str]
) -> tuple[list[str], list[str]]:
    """The nodes with which a job continues that some shall leave, in the order of their ranks.

    None if it shall not shrink, or cannot: the reasons then say why, as ``fewer_nodes`` does.
    """
    active, rule = members.active, state.record.rank_rule
    if spec.settings.on_no_spare not in MAY_SHRINK or rule is None:
        return [], []
    left = [node for node in active if node not in leaving]
    return _fewer_of(spec, left, len(active), rule)


def more_nodes(
    spec: JobSpec, state: JobState, members: Membership, there: Collection[str]
) -> list[str]:
    """The nodes with which a job continues that had shrunk; empty if it stays as it is.

    ``there`` are nodes that can be reached.  Those that train stay, in their order.
    """
    active, rule = members.active, state.record.rank_rule
    if spec.settings.grow == "off" or len(active) >= spec.nodes or rule is None:
        return []
    more = [n for n in there if n not in active and n not in members.leaving]
    chosen, _ = _fewer_of(spec, [*active, *more], spec.nodes + 1, rule)
    return chosen if len(chosen) > len(active) and set(active) <= set(chosen) else []


def _fewer_of(
    spec: JobSpec, left: Sequence[str], before: int, rule: RankRule
) -> tuple[list[str], list[str]]:
    per_node, domains = spec.ranks_per_node, spec.domains
    return fewer_nodes(left, before, per_node, rule, domains, spec.scheme, spec.shapes)


def fewer_nodes(
    left: Sequence[str],
    before: int,
    ranks_per_node: int,
    rule: RankRule,
    domains: Domains,
    scheme: Scheme,
    shapes: Shapes,
) -> tuple[list[str], list[str]]:
    """As many of the nodes that are ``left`` as the job can continue with, fewer than ``before``.

    Nodes that come first are preferred.  Each has ``ranks_per_node`` ranks; if ``scheme`` has
    parity, some stripes over them keep the rule of failure domains.  ``rule`` says nothing of
    numbers of nodes that ``shapes`` name.  Empty if no number will do; the reasons say why each
    larger one does not.  Pure.
    """
    reasons: list[str] = []
    for count in range(min(len(left), before - 1), 0, -1):
        chosen = choose_active(left, count, domains, scheme)
        against = "--shapes forbids it" if shapes.get(count, ()) is None else ""
        if count not in shapes:
            against = rule.against(count * ranks_per_node)
        reason = against or _unprotected(chosen, domains, scheme)
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
