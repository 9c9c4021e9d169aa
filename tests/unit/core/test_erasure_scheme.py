"""Schemes as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.errors import ConfigError, ProtectionError
from megatron_ft.core.scheme import MAX_MEMBERS, Scheme, largest_scheme

schemes = st.one_of(
    st.integers(2, MAX_MEMBERS).map(lambda n: Scheme("xor", n - 1, 1)),
    st.integers(2, MAX_MEMBERS).map(lambda r: Scheme("replica", 1, r - 1)),
    st.tuples(st.integers(1, 32), st.integers(1, 32)).map(lambda km: Scheme("rs", *km)),
    st.just(Scheme("none", 1, 0)),
)


@given(schemes)
def test_a_scheme_is_written_as_it_is_read(scheme: Scheme) -> None:
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "data", "parity"),
    [("xor:4", 3, 1), ("rs:6+2", 6, 2), ("replica:2", 1, 1), ("replica:3", 1, 2), ("none", 1, 0)],
)
def test_what_the_forms_mean(text: str, data: int, parity: int) -> None:
    scheme = Scheme.parse(text)
    assert (scheme.data_members, scheme.parity_members) == (data, parity)
    assert scheme.members == data + parity


@pytest.mark.parametrize(
    "text",
    ["", "xor", "xor:1", "xor:0", "rs:4", "rs:0+2", "rs:4+0", "rs:60+5", "replica:1", "none:1",
     "raid:5", "xor:-4", "rs:4+1+1"],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="scheme"):
        Scheme.parse(text)


@given(schemes, st.integers(1, MAX_MEMBERS))
def test_a_shortened_scheme_loses_no_parity(scheme: Scheme, members: int) -> None:
    if members > scheme.members:
        return
    if members <= scheme.parity_members:
        with pytest.raises(ProtectionError, match=str(scheme.parity_members + 1)):
            scheme.shortened(members)
        return
    short = scheme.shortened(members)
    assert (short.members, short.parity_members) == (members, scheme.parity_members)


@given(schemes, st.integers(1, MAX_MEMBERS))
def test_the_largest_scheme_needs_no_more_domains_than_there_are(
    scheme: Scheme, domains: int
) -> None:
    assert largest_scheme(scheme, domains).members <= domains
