"""A weight without a gradient in a step gets none, though DeepSpeed keeps an earlier one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers.zero import OldGradients


@pytest.fixture
def engine() -> Any:
    """Weights 7 and 8 in a partition of four elements, as DeepSpeed's offload keeps them."""
    flat = torch.zeros(4, requires_grad=True)
    flat.grad = torch.ones(4)
    wrapper = SimpleNamespace(
        optimizer=torch.optim.SGD([flat], lr=1.0),
        grad_position={7: [0, 0, 0, 3], 8: [0, 0, 3, 1]},
        norm_for_param_grads={7: torch.ones(()), 8: torch.ones(())},
        single_partition_of_fp32_groups=[flat],
        accumulated_grads_in_cpu={},
        micro_step_id=0,
        get_param_id=int,
    )

    def accumulate(number: int) -> None:
        kept = wrapper.accumulated_grads_in_cpu.setdefault(number, torch.zeros(1))
        kept.copy_(1 + (kept if wrapper.micro_step_id > 0 else 0))

    wrapper.async_accumulate_grad_in_cpu_via_gpu = accumulate
    return SimpleNamespace(optimizer=wrapper, global_steps=4)


def test_an_earlier_gradient_is_not_applied_again(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    OldGradients(engine)
    wrapper = engine.optimizer
    (flat,) = wrapper.single_partition_of_fp32_groups
    wrapper.optimizer.step()
    assert flat.tolist() == [-1] * 4 and not caplog.text
    del wrapper.norm_for_param_grads[8]
    for _ in range(2):
        wrapper.optimizer.step()
    assert flat.tolist() == [-3, -3, -3, -1]
    assert caplog.text.count("1 weights had no gradient in step 5 and get none") == 1


def test_nor_is_it_added_to_that_of_a_later_micro_batch(engine: Any) -> None:
    OldGradients(engine)
    wrapper = engine.optimizer
    sums = []
    for micro_steps in ((0, 1), (1,), (0, 1)):
        for wrapper.micro_step_id in micro_steps:
            wrapper.async_accumulate_grad_in_cpu_via_gpu(7)
        sums.append(wrapper.accumulated_grads_in_cpu[7].item())
        engine.global_steps += 1
    assert sums == [2, 1, 2]
