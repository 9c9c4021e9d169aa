"""What Megatron would save and no snapshot describes is refused by its name."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.core.errors import ExportError
from megatron_ft.megatron.logical_map import RankTensors, _Finder
from megatron_ft.megatron.save_form import SaveForm


def test_a_tensor_joined_from_padded_buckets_is_named() -> None:
    finder = _Finder(SaveForm({}, {}), RankTensors({}, {}, (), {}), {})
    with pytest.raises(ExportError, match=r"optimizer\.exp_avg .*fully-reshardable"):
        finder.find("optimizer.exp_avg", torch.empty(3, device="meta"))
