"""The stand-in for CUDA devices on a build of torch that knows CUDA."""

from __future__ import annotations

import subprocess
import sys

# No CUDA build is here: torch is made to answer as one does on a machine without a device.
_AS_A_CUDA_BUILD = """
import torch

def no_device(*_arguments):
    raise torch.AcceleratorError("CUDA error: no CUDA-capable device is detected")

torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch._C._accelerator_getStream = torch._C._accelerator_getDeviceIndex = no_device

from megatron_ft.cli.demo import cpu_device
cpu_device.install(megatron=False)

weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    weight.sum().backward()
    kind([weight], lr=0.1).step()
assert torch.cuda.is_available()
assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
"""


def test_an_optimizer_steps_on_a_cuda_build_without_a_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AS_A_CUDA_BUILD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
