"""Failure domains: reading them, and who trains and who takes over because of them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.core.errors import ConfigError, ProtectionError
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import check_domains, crowded, possible_scheme, stripe_sets
from megatron_ft.supervisor.failure_domains import expand_hostlist, parse_domains, read_domains
from megatron_ft.supervisor.seats import choose_active, choose_spares, stripes_by_position


def test_a_simple_file_is_read() -> None:
    assert parse_domains("# racks\nrack1: node[0-1], node7\nrack2: m0 # here\n", "t") == {
        "node0": "rack1", "node1": "rack1", "node7": "rack1", "m0": "rack2"
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 120)), min_size=1, unique=True))
def test_hostlists_are_expanded_in_order(nodes: list[tuple[str, int]]) -> None:
    parts = [f"{name}[{','.join(f'{n:03d}' for _, n in group)}]" for name, group in
             ((k, list(g)) for k, g in itertools.groupby(nodes, lambda pair: pair[0]))]  # fmt: skip
    assert expand_hostlist(",".join(parts)) == [f"{name}{n:03d}" for name, n in nodes]
    assert expand_hostlist("r[1-2]n[8-10]") == [f"r{r}n{n}" for r in (1, 2) for n in (8, 9, 10)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nwhat is this\n", "line 2.*not a valid failure domain"),
        ("a: n[3-1]", r"\[3-1\] is not a valid range"),
        ("a: n[x]", "not a valid range"),
        ("a: n[1", "not a valid list of nodes"),
        ("a: n1\nb: n1", "n1 is in.*b.*a"),
        ("a: n[0-99999999]", "not a valid range"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_domains(text, "file")


@given(st.text(alphabet="n01[]-,:=# \nSwitchName", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_domains(text, "t")
    except ConfigError:
        pass


def test_a_node_that_is_not_named_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "racks"
    path.write_text("a: node[0-2]")
    assert read_domains(str(path), ["node1"]) == {"node1": "a"}
    with pytest.raises(ConfigError, match="node3 in no failure domain"):
        read_domains(str(path), ["node1", "node3"])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_domains(str(tmp_path / "none"), ["node1"])


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
schemes = st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda km: Scheme("rs", *km))


def nodes_of(domains: list[int]) -> tuple[list[str], dict[str, str]]:
    found = {f"n{d}-{i}": f"d{d}" for d, count in enumerate(domains) for i in range(count)}
    return list(found), found


@given(sizes, schemes)
def test_the_scheme_that_a_refusal_names_can_be_met(domains: list[int], scheme: Scheme) -> None:
    nodes, names = nodes_of(domains)
    try:
        check_domains(nodes, names, scheme)
    except ProtectionError as error:
        possible = possible_scheme(len(nodes), max(domains), scheme)
        if len(nodes) >= scheme.members:
            assert (possible is None) == (len(domains) == 1), error
        if possible is not None:
            check_domains(nodes, names, possible)
    else:
        assert stripe_sets(len(nodes), max(domains), scheme) is not None


@settings(max_examples=60)
@given(sizes, st.integers(0, 4), schemes, st.randoms(use_true_random=False))
def test_nodes_that_train_allow_stripes_if_any_choice_does(
    domains: list[int], spares: int, scheme: Scheme, random: object
) -> None:
    nodes, names = nodes_of(domains)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    count = max(1, len(nodes) - spares)

    def possible(chosen: tuple[str, ...]) -> bool:
        largest = max(Counter(names[n] for n in chosen).values())
        return stripe_sets(len(chosen), largest, scheme) is not None

    active = choose_active(nodes, count, names, scheme)
    assert len(active) == count and active == [n for n in nodes if n in active]
    assert possible(tuple(active)) == any(map(possible, itertools.combinations(nodes, count)))
    if possible(tuple(nodes[:count])):
        assert active == nodes[:count]


@settings(max_examples=60)
@given(sizes, st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 2), st.data())
def test_spares_keep_the_rule_if_any_choice_does(
    domains: list[int], spare_domains: list[int], most: int, data: st.DataObject
) -> None:
    active, names = nodes_of(domains)
    spares = [f"s{i}" for i in range(len(spare_domains))]
    names |= {s: f"d{d}" for s, d in zip(spares, spare_domains, strict=True)}
    lost = data.draw(st.lists(st.sampled_from(active), unique=True, max_size=len(spares)))
    size = data.draw(st.integers(2, 4))
    stripes = [range(i, min(i + size, len(active))) for i in range(0, len(active), size)]

    def broken(chosen: dict[str, str]) -> int:
        now = [chosen.get(node, node) for node in active]
        found = crowded([[now[i] for i in stripe] for stripe in stripes], names, most)
        return sum(len(nodes) - most for _, nodes in found)

    chosen = choose_spares(active, lost, spares, stripes, names, most)
    assert list(chosen) == lost and len(set(chosen.values())) == len(lost)
    every = itertools.permutations(spares, len(lost))
    assert broken(chosen) == min(broken(dict(zip(lost, p, strict=True))) for p in every)


def test_many_spares_of_one_domain_do_not_hide_another() -> None:
    """There are more orders of 20 spares than are compared."""
    active, lost = [f"n{i}" for i in range(8)], ["n0", "n2", "n4", "n6"]
    spares = [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(10)]
    names = {n: "a" for n in (*active, *spares[:10])} | dict.fromkeys(spares[10:], "b")
    chosen = choose_spares(active, lost, spares, [{0, 1}, {2, 3}, {4, 5}, {6, 7}], names, 1)
    assert list(chosen.values()) == ["b0", "b1", "b2", "b3"]


def test_without_domains_spares_are_taken_in_order() -> None:
    assert choose_spares(["a", "b"], ["b", "a"], ["s", "t"], [{0, 1}], {}, 1) == {
        "b": "s", "a": "t"
    }  # fmt: skip


def test_stripes_are_known_by_the_positions_of_their_nodes() -> None:
    positions = {"r0": 0, "r1": 0, "r2": 1, "r3": 1}
    members = [("r0", "r2"), ("r1", "r3"), ("r1", "gone")]
    assert stripes_by_position(members, positions) == [frozenset({0}), frozenset({0, 1})]


def test_run_refuses_stripes_in_one_rack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "racks"
    path.write_text("rack1: node[0-3]\nrack2: node4\n")
    flags = ["--failure-domains", str(path), "--arena-dir", str(tmp_path), "--state-dir"]
    wanted = ["--nodes", "4", "--spares", "1", "--protect", "rs:3+1"]
    assert cli.main(["run", *wanted, *flags, str(tmp_path / "s"), "--", "true"]) == 2
    said = capsys.readouterr().err
    # The first four are all of rack1, so one of them becomes the spare; that is not enough.
    assert "one failure domain; rack1 holds 3 (node0, node1, node2)" in said


def test_a_longer_stripe_comes_before_more_parity() -> None:
    """Seven nodes are no pairs: one trio takes the odd one, not six copies."""
    assert str(possible_scheme(7, 1, Scheme.parse("xor:2"))) == "xor:3"
    assert str(possible_scheme(3, 1, Scheme.parse("replica:2"))) == "replica:3"
