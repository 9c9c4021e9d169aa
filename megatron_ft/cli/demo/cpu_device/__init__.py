"""Drive Megatron-LM's real training loop on a machine without CUDA.

Call :func:`install` before the first ``import megatron``.  Megatron's files are not
edited: the process pretends to have CUDA devices whose memory is host memory.  Every
request for a "cuda" device is answered with a CPU tensor, streams and events are empty
(host operations are already in order), and the host random generator plays the device's.
Collectives need no help: gloo has all that Megatron's data, tensor, pipeline and expert
parallel paths call.

What this cannot show: ``.cuda()`` and ``.cpu()`` do not copy here, so races, pinned
memory and overlap need a real device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from megatron_ft.cli.demo.cpu_device import cuda_api, megatron_gaps, random_state, tensors
from megatron_ft.megatron import versions

TORCH_GROUPS = (
    tensors.replace_factories,
    tensors.replace_moves,
    tensors.replace_type_names,
    cuda_api.replace_devices,
    cuda_api.replace_memory,
    cuda_api.replace_streams,
    cuda_api.hide_accelerators,
    random_state.replace_generators,
    random_state.keep_data_loader_off_the_generator,
    versions.supply_typing_override,
    versions.stub_triton,
)
"""The first part: touches only torch and the import table."""

MEGATRON_GROUPS: dict[str, Callable[[], None]] = {
    "megatron.core.datasets.utils": megatron_gaps.find_dataset_helper,
    "megatron.training.initialize": megatron_gaps.skip_jit_warmup,
    "megatron.core.transformer.torch_norm": megatron_gaps.allow_sequence_parallel_torch_norm,
    "megatron.core.optimizer.distrib_optimizer": megatron_gaps.fill_torch_adam_state,
}
"""The second part fills what Megatron lacks without CUDA extensions.

By the module that each changes, so that it can be called behind that module's import.
"""

_installed: set[str] = set()


def needed() -> bool:
    """True if this machine has no CUDA device, real or pretended, so the stand-in is wanted."""
    import torch

    return not torch.cuda.is_available()


def install(*, megatron: bool = True) -> None:
    """Put the stand-in in place in this process, once; a second call adds only what is missing.

    ``megatron=False`` leaves Megatron unimported, for processes that only read
    what a training process sent them.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    parts: dict[str, Iterable[Callable[[], None]]] = {"torch": TORCH_GROUPS}
    if megatron:
        parts["megatron"] = MEGATRON_GROUPS.values()
    for part, groups in parts.items():
        if part not in _installed:
            _installed.add(part)
            for group in groups:
                group()


__all__ = ["install", "needed"]
