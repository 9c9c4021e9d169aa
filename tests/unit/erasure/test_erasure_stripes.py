"""Which shards meet in a stripe: properties over random clusters, and the refusals."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.errors import ProtectionError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import (
    RankPlace,
    StripePlan,
    check_domains,
    padded_bytes,
    plan_stripes,
)

BLOCK = 4096


def cluster(
    domains: list[int], local_ranks: int | list[int] = 2, coordinates: list[int] | None = None
) -> list[RankPlace]:
    """Ranks on ``domains[d]`` nodes in each failure domain d."""
    ranks: list[RankPlace] = []
    node = 0
    for domain, count in enumerate(domains):
        for _ in range(count):
            here = local_ranks if isinstance(local_ranks, int) else local_ranks[node]
            stage = 0 if coordinates is None else coordinates[node]
            for local in range(here):
                rank = len(ranks)
                shard, host, rack = f"s{rank}", f"n{node}", f"d{domain}"
                ranks.append(RankPlace(rank, shard, host, rack, local, (stage, local), 100 + rank))
            node += 1
    return ranks


schemes = st.one_of(
    st.integers(2, 6).map(lambda n: Scheme("xor", n - 1, 1)),
    st.tuples(st.integers(1, 5), st.integers(1, 3)).map(lambda km: Scheme("rs", *km)),
    st.integers(2, 3).map(lambda r: Scheme("replica", 1, r - 1)),
    st.just(Scheme("none", 1, 0)),
)


@st.composite
def clusters(draw: st.DrawFn) -> list[RankPlace]:
    domains = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    nodes = sum(domains)
    counts = st.lists(st.integers(1, 3), min_size=nodes, max_size=nodes)
    ranks = cluster(domains, draw(counts), draw(counts))
    return draw(st.permutations(ranks))


def check(plans: tuple[StripePlan, ...], ranks: list[RankPlace], scheme: Scheme) -> None:
    place = {rank.shard_id: rank for rank in ranks}
    assert Counter(s for plan in plans for s in plan.members) == Counter(list(place))
    assert [plan.index for plan in plans] == list(range(len(plans)))
    for plan in plans:
        count = len(plan.members)
        assert count <= scheme.members
        most = Counter(place[s].domain for s in plan.members).most_common(1)[0][1]
        assert most <= max(1, scheme.parity_members)
        assert plan.nodes == tuple(place[s].node for s in plan.members)
        assert plan.parity_members == scheme.parity_members
        assert plan.data_members == count - plan.parity_members >= 1
        assert plan.data_bytes % (plan.data_members * BLOCK) == 0
        assert plan.data_bytes >= max(place[s].required_bytes for s in plan.members)
        assert plan.kind == scheme.kind


@given(clusters(), schemes)
def test_any_cluster_is_striped_soundly_or_refused(ranks: list[RankPlace], scheme: Scheme) -> None:
    try:
        plans = plan_stripes(ranks, scheme, block_bytes=BLOCK)
    except ProtectionError:
        return
    check(plans, ranks, scheme)


@lru_cache
def divisible(domains: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether nodes can be divided into stripes at all, by trying every first stripe."""
    if not sum(domains):
        return True
    parity = scheme.parity_members
    choices = itertools.product(*(range(min(count, parity) + 1) for count in domains))
    for chosen in choices:
        if parity < sum(chosen) <= scheme.members:
            left = (count - taken for count, taken in zip(domains, chosen, strict=True))
            if divisible(tuple(sorted(left)), scheme):
                return True
    return False


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 2),
    schemes.filter(lambda scheme: scheme.parity_members > 0),
)
def test_domains_are_refused_only_where_no_division_exists(
    domains: list[int], local_ranks: int, scheme: Scheme
) -> None:
    ranks = cluster(domains, local_ranks)
    if sum(domains) >= scheme.members and divisible(tuple(sorted(domains)), scheme):
        check(plan_stripes(ranks, scheme, block_bytes=BLOCK), ranks, scheme)
    else:
        with pytest.raises(ProtectionError):
            plan_stripes(ranks, scheme, block_bytes=BLOCK)


@given(clusters(), schemes)
def test_the_plan_does_not_depend_on_the_order_of_ranks(
    ranks: list[RankPlace], scheme: Scheme
) -> None:
    def outcome(given_ranks: list[RankPlace]) -> object:
        try:
            return plan_stripes(given_ranks, scheme, block_bytes=BLOCK)
        except ProtectionError:
            return None

    assert outcome(ranks) == outcome(sorted(ranks, key=lambda r: r.rank))


def test_all_stripes_of_a_node_are_on_one_node_set() -> None:
    plans = plan_stripes(cluster([1] * 11, 4), Scheme.parse("rs:3+1"), block_bytes=BLOCK)
    sets = defaultdict(set)
    for plan in plans:
        for node in plan.nodes:
            sets[node].add(plan.nodes)
    assert all(len(found) == 1 for found in sets.values())
    assert sorted({len(plan.members) for plan in plans}) == [3, 4]


def test_nodes_of_one_pipeline_stage_meet() -> None:
    """Interleaved stages are brought together, so that stripes have shards of one size."""
    ranks = cluster([1] * 8, 2, [0, 1] * 4)
    for plan in plan_stripes(ranks, Scheme.parse("xor:4"), block_bytes=BLOCK):
        assert len({int(node[1:]) % 2 for node in plan.nodes}) == 1


def test_racks_with_several_nodes_do_not_share_a_stripe_where_that_is_possible() -> None:
    plans = plan_stripes(cluster([3, 3, 3, 3], 2), Scheme.parse("rs:2+2"), block_bytes=BLOCK)
    for plan in plans:
        assert len({int(node[1:]) // 3 for node in plan.nodes}) == 4


def test_two_members_of_one_rack_are_allowed_where_two_may_be_lost() -> None:
    ranks = cluster([2, 2])
    (members,) = {p.nodes for p in plan_stripes(ranks, Scheme.parse("rs:2+2"), block_bytes=BLOCK)}
    assert set(members) == {"n0", "n1", "n2", "n3"}


def test_a_rack_that_is_too_large_is_named() -> None:
    with pytest.raises(ProtectionError, match=r"d1 holds 3 \(n1, n2, n3\).*rs:2\+3"):
        plan_stripes(cluster([1, 3, 1]), Scheme.parse("rs:3+1"), block_bytes=BLOCK)
    with pytest.raises(ProtectionError, match=r"d0 holds 4 .*no scheme can be met"):
        plan_stripes(cluster([4]), Scheme.parse("rs:3+1"), block_bytes=BLOCK)


@given(
    count=st.integers(1, 60),
    data=st.integers(1, 8),
    parity=st.integers(1, 4),
    replica=st.booleans(),
)
@settings(deadline=None)
def test_nodes_that_no_stripes_can_be_made_of_are_refused_with_ways_out(
    count: int, data: int, parity: int, replica: bool
) -> None:
    """No failure domain is to blame, so none is named; what is proposed can be had."""
    kind = "replica" if replica else "xor" if parity == 1 else "rs"
    scheme = Scheme(kind, 1 if replica else data, parity)
    names = [f"n{i}" for i in range(count)]
    try:
        check_domains(names, {}, scheme)
    except ProtectionError as error:
        said = str(error)
    else:
        return
    if count < scheme.members:
        assert f"needs {scheme.members} nodes" in said
        return
    assert "failure domain" not in said
    found = re.search(r"or (\S+), the nearest that can be met$", said)
    assert found, said
    check_domains(names, {}, Scheme.parse(found[1]))


@pytest.mark.parametrize(
    ("domains", "scheme", "largest"),
    [(3, "xor:4", "xor:3"), (1, "xor:2", "none"), (4, "rs:6+2", "rs:2+2"), (2, "rs:2+2", "rs:1+1"),
     (2, "replica:3", "replica:2")],
)  # fmt: skip
def test_too_few_domains_name_the_largest_scheme(domains: int, scheme: str, largest: str) -> None:
    with pytest.raises(ProtectionError, match=re.escape(f"that can be met is {largest}")):
        plan_stripes(cluster([1] * domains), Scheme.parse(scheme), block_bytes=BLOCK)
    plan_stripes(cluster([1] * domains), Scheme.parse(largest), block_bytes=BLOCK)


def test_a_remainder_that_is_too_small_is_refused() -> None:
    with pytest.raises(ProtectionError, match="3 nodes.*replica:2"):
        plan_stripes(cluster([1] * 3), Scheme.parse("replica:2"), block_bytes=BLOCK)


def test_uneven_nodes_shorten_a_stripe_while_parity_lasts() -> None:
    plans = plan_stripes(cluster([1] * 4, [2, 2, 2, 1]), Scheme.parse("rs:3+1"), block_bytes=BLOCK)
    assert [(p.data_members, p.parity_members) for p in plans] == [(3, 1), (2, 1)]
    with pytest.raises(ProtectionError, match="n0"):
        plan_stripes(cluster([1] * 4, [2, 1, 1, 1]), Scheme.parse("rs:3+1"), block_bytes=BLOCK)


def test_contradictions_are_refused() -> None:
    ranks = cluster([1, 1])
    with pytest.raises(ValueError, match="same shard id"):
        plan_stripes([*ranks, ranks[0]], Scheme.parse("xor:2"))
    moved = RankPlace(9, "s9", ranks[0].node, "elsewhere", 9, (), 1)
    with pytest.raises(ValueError, match="failure domains"):
        plan_stripes([*ranks, moved], Scheme.parse("xor:2"))


def test_padding_is_whole_blocks_in_every_chunk() -> None:
    assert padded_bytes([0], 3, 10) == 30
    assert padded_bytes([30, 5], 3, 10) == 30
    assert padded_bytes([31], 3, 10) == 60
