"""A Megatron that lacks what is wrapped is refused, by name and before training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.frameworks import MEGATRON, Required, check_release, version_numbers
from tests.support.warm_host import WarmHost


def check(version: str, *required: Required) -> None:
    check_release(MEGATRON, version, required, "--inmem-snapshot")


@pytest.mark.parametrize("version", ["0.16.1", "0.12.0rc3", "0.9"])
def test_an_old_release_is_refused_and_working_ones_are_named(version: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"0\.17\.1, 0\.18\.2 and 0\.19\.2") as caught:
        check(version)
    assert version in str(caught.value)


@pytest.mark.parametrize("version", ["0.17.1", "0.19.2", "0.20.0rc1", "1.0"])
def test_a_newer_release_is_tried(version: str) -> None:
    check(version)


def test_a_release_candidate_counts_as_its_release() -> None:
    assert version_numbers("0.19.0rc1") == (0, 19)


def test_a_renamed_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check("0.30.0", Required("textwrap", "wrap", ("text", "columns")))
    assert "no parameter 'columns' of textwrap.wrap" in str(caught.value)
    assert "0.30.0" in str(caught.value) and MEGATRON.working in str(caught.value)
    assert "'text'" not in str(caught.value)


@pytest.mark.parametrize("owner", ["textwrap", "textwrap.TextWrapper", "no_such_module"])
def test_a_missing_function_class_or_module_is_refused_by_name(owner: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=f"no function {owner}.unwrap"):
        check("0.30.0", Required(owner, "unwrap"))


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)
def test_the_real_megatron_is_wrapped_once_and_shows_the_flags(
    megatron_server: WarmHost, tmp_path: Path
) -> None:
    megatron_server.call("tests.programs.megatron_flags:wrap_once", tmp_path)
