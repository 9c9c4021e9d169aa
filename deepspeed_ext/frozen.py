"""Whether parameters that no optimizer owns stay as they are, as captures rely on.

They are copied while the next step runs.  A script that updates some of them itself, such as a
momentum teacher, would have snapshots that hold a mixture of two steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_ft.capture.values import same_bits
from megatron_ft.errors import ConfigError

_SAMPLES = 64
"""Elements that are looked at of each: a moving average changes nearly all of them."""


class FrozenParameters:
    """Remembers samples of tensors by name, and refuses others than it knows.

    Nothing is known before the first check, which is when training begins: until then a script
    may set what it likes.
    """

    def __init__(self) -> None:
        self._known: dict[str, torch.Tensor] | None = None

    def forget(self) -> None:
        """The next check knows nothing: a snapshot was restored."""
        self._known = None

    def loaded(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A load has set these values, which is no change by the script."""
        if self._known is not None:
            self._known = _samples(tensors)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """ConfigError that names a tensor whose samples have changed.

        All are fetched at once, so that a device is waited for once.
        """
        if self._known is None:
            self._known = _samples(tensors)
            return
        now = {name: _sample(tensor) for name, tensor in tensors.items() if name in self._known}
        before = {name: self._known[name] for name in now}
        if same_bits(_joined(now), _joined(before)):
            return
        changed = [name for name, values in now.items() if not same_bits(values, before[name])]
        raise ConfigError(
            f"{len(changed)} parameters without an optimizer, {changed[0]} first, were changed by "
            "the script, and snapshots copy them while the next step runs: keep weights that the "
            "script updates (a moving average, a teacher) in buffers, or outside of the model"
        )


def _samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _sample(tensor) for name, tensor in tensors.items()}


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements from all over it, as bytes, where it is."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone().view(torch.uint8)


def _joined(samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One tensor on the host: one wait for each device, not one for each sample."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples.values():
        by_device.setdefault(sample.device, []).append(sample)
    parts = [torch.cat(each).cpu() for each in by_device.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
