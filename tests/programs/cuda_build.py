"""An optimizer's step where torch answers as a CUDA build does on a machine without a device."""

from __future__ import annotations

from typing import Any

import torch


def no_device(*_arguments: Any) -> Any:
    raise torch.AcceleratorError("CUDA error: no CUDA-capable device is detected")


answers: Any = torch._C
answers._accelerator_getAccelerator = lambda: torch.device("cuda")
answers._accelerator_getStream = answers._accelerator_getDeviceIndex = no_device

from megatron_ft.cli.demo import cpu_device  # noqa: E402

cpu_device.install(megatron=False)

weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    weight.sum().backward()
    kind([weight], lr=0.1).step()
assert torch.cuda.is_available()
assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
