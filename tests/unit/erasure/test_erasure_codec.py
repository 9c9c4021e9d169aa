"""Codecs: every loss is solved, and all ways to compute a row agree bit for bit."""

from __future__ import annotations

import itertools
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core import isal
from megatron_ft.core.errors import ConfigError, MissingEnvironmentError
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.codec import Codec, open_codec

SHAPES = [(1, 1), (2, 1), (3, 2), (6, 2), (5, 3), (1, 2), (8, 4)]


def random_columns(k: int, length: int) -> list[Bytes]:
    return list(np.random.default_rng(k).integers(0, 256, (k, length), dtype=np.uint8))


def all_symbols(codec: Codec, columns: list[Bytes]) -> list[Bytes]:
    k, m = codec.data_members, codec.parity_members
    parities = [np.empty_like(columns[0]) for _ in range(m)]
    codec.kernel(range(k, k + m), range(k))(columns, parities)
    return columns + parities


def check_every_loss(codec: Codec, length: int) -> None:
    k, m = codec.data_members, codec.parity_members
    symbols = all_symbols(codec, random_columns(k, length))
    for lost in itertools.combinations(range(k + m), m):
        given = [n for n in range(k + m) if n not in lost]
        outputs = [np.zeros(length, np.uint8) for _ in lost]
        codec.kernel(lost, given)([symbols[n] for n in given], outputs)
        for number, output in zip(lost, outputs, strict=True):
            assert np.array_equal(output, symbols[number]), (lost, number)


@pytest.mark.parametrize(("k", "m"), SHAPES)
@pytest.mark.parametrize("length", [0, 1, 4099])
def test_reed_solomon_solves_every_loss(k: int, m: int, length: int) -> None:
    check_every_loss(open_codec("rs", k, m), length)


@pytest.mark.parametrize(("kind", "k", "m"), [("xor", 3, 1), ("replica", 1, 2)])
def test_xor_and_copies_solve_every_loss(kind: str, k: int, m: int) -> None:
    check_every_loss(open_codec(kind, k, m), 1009)


@pytest.mark.parametrize(("k", "m"), SHAPES)
@pytest.mark.parametrize("length", [32, 65536])
def test_pyeclib_gives_the_same_parity(k: int, m: int, length: int) -> None:
    """Another implementation of the same code, through its own public call."""
    driver = import_module("pyeclib.ec_iface").ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
    columns = random_columns(k, length)
    theirs = driver.encode(b"".join(column.tobytes() for column in columns))
    ours = all_symbols(open_codec("rs", k, m), columns)
    assert [fragment[-length:] for fragment in theirs] == [symbol.tobytes() for symbol in ours]


@given(st.integers(1, 6), st.integers(1, 4), st.data())
@settings(max_examples=30)
def test_any_k_symbols_are_enough(k: int, m: int, data: st.DataObject) -> None:
    given = data.draw(st.permutations(range(k + m)))[:k]
    wanted = data.draw(st.lists(st.integers(0, k + m - 1), min_size=1, max_size=k + m))
    codec = open_codec("rs", k, m)
    symbols = all_symbols(codec, random_columns(k, 50))
    outputs = [np.zeros(50, np.uint8) for _ in wanted]
    codec.kernel(wanted, given)([symbols[n] for n in given], outputs)
    assert all(np.array_equal(o, symbols[n]) for n, o in zip(wanted, outputs, strict=True))


def test_xor_is_what_it_says() -> None:
    columns = random_columns(4, 100)
    parity = all_symbols(open_codec("xor", 4, 1), columns)[4]
    assert np.array_equal(parity, np.bitwise_xor.reduce(columns))


@pytest.mark.parametrize(("kind", "k", "m"), [("none", 1, 0), ("raid", 3, 1), ("rs", 0, 1)])
def test_what_is_no_code_is_refused(kind: str, k: int, m: int) -> None:
    with pytest.raises(ConfigError):
        open_codec(kind, k, m)


def test_without_isal_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingEnvironmentError("install the pyeclib wheel")

    monkeypatch.setattr(isal, "load", missing)
    with pytest.raises(MissingEnvironmentError, match="pyeclib wheel"):
        open_codec("rs", 3, 2)
