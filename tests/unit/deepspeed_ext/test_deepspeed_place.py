"""Names of shards from DeepSpeed's groups; whole jobs are in the tests of resumed runs."""

from __future__ import annotations

import pytest

from deepspeed_ext.attachment import check_unique, mpu_rank
from deepspeed_ext.optimizers.view import group_names
from megatron_ft.core.errors import ConfigError


class OldMpu:
    """Has one name for both kinds of model parallelism."""

    def get_model_parallel_rank(self) -> int:
        return 3


class MegatronMpu(OldMpu):
    """Tells tensor ranks from those of the whole model."""

    def get_tensor_model_parallel_rank(self) -> int:
        return 1


NAMES = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")


@pytest.mark.parametrize(("mpu", "rank"), [(None, 0), (OldMpu(), 3), (MegatronMpu(), 1)])
def test_the_most_precise_method_counts(mpu: object, rank: int) -> None:
    assert mpu_rank(mpu, NAMES) == rank


def test_two_ranks_of_one_place_are_refused() -> None:
    check_unique(["pp0-tp0-dp0-ep0", "pp0-tp0-dp1-ep0"])
    with pytest.raises(ConfigError, match="ranks 1 and 2 are both pp0-tp0-dp1-ep0"):
        check_unique(["pp0-tp0-dp0-ep0", "pp0-tp0-dp1-ep0", "pp0-tp0-dp1-ep0"])


def test_groups_of_experts_keep_their_names_in_any_order() -> None:
    dense = [{"name": "decaying"}, {}]
    sparse = [{"name": name, "moe": True} for name in ("ep_size_2", "ep_size_4", "ep_size_2")]
    assert group_names(dense + sparse) == ["0", "1", "ep_size_2.0", "ep_size_4.0", "ep_size_2.1"]
    turned = [sparse[1], sparse[0], sparse[2]]
    assert group_names(dense + turned) == ["0", "1", "ep_size_4.0", "ep_size_2.0", "ep_size_2.1"]
