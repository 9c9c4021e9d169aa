"""Whether parameters that no optimizer owns stay as they are, as captures rely on.

They are copied while the next step runs.  A script that updates some of them itself, such as a
momentum teacher, would have snapshots that hold a mixture of two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_ft.core.errors import ConfigError
from megatron_ft.trainer.values import same_bits

_SAMPLES = 64
"""Elements that are looked at of each: a moving average changes nearly all of them."""

LOOKED_AT = 32
"""Parameters that are looked at in a check, spread over all: training waits while the work for
each is queued, and a model with adapters has thousands that are frozen."""


class _Look(NamedTuple):
    """What is found in one check; ``differs`` says so once its device has come to it."""

    names: Sequence[str]
    differs: torch.Tensor


class FrozenParameters:
    """Remembers samples of tensors by name, and refuses others than it knows.

    Nothing is known before the first check, which is when training begins: until then a script
    may set what it likes.
    """

    def __init__(self) -> None:
        self._known: dict[str, torch.Tensor] | None = None
        self._checks = 0
        self._looks: list[_Look] = []
        self._problem = ""

    def forget(self) -> None:
        """The next check knows nothing: a snapshot was restored."""
        self._know(None)

    def loaded(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A load has set these values, which is no change by the script."""
        if self._known is not None:
            self._know(_samples(tensors))

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """ConfigError that names a tensor whose samples have changed, from then on each time.

        Looks at some; what it finds on a device it says in the next check, as nobody waits for
        the device here.
        """
        if self._known is None:
            self._know(_samples(tensors))
            return
        if not self._problem:
            self._settle(tensors)
            self._begin([name for name in self._known if name in tensors], tensors)
            if not any(look.differs.is_cuda for look in self._looks):
                self._settle(tensors)
        if self._problem:
            raise ConfigError(
                f"{self._problem}, a parameter without an optimizer, was changed by the script, "
                "and snapshots copy such parameters while the next step runs: keep weights that "
                "the script updates (an average, a teacher) in buffers, or outside of the model"
            )

    def _know(self, samples: dict[str, torch.Tensor] | None) -> None:
        self._known, self._looks, self._problem = samples, [], ""

    def _begin(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._known is not None
        step = -(-len(names) // LOOKED_AT) or 1
        chosen = names[self._checks % step :: step]
        self._checks += 1
        kinds = {name: (tensors[name].device, tensors[name].dtype) for name in chosen}
        for device, dtype in dict.fromkeys(kinds.values()):
            here = [name for name in chosen if kinds[name] == (device, dtype)]
            now = torch.cat([_elements(tensors[name]) for name in here]).view(torch.uint8)
            before = torch.cat([self._known[name].to(device) for name in here])
            same_form = now.shape == before.shape
            self._looks.append(
                _Look(here, (now != before).any() if same_form else torch.tensor(True))
            )

    def _settle(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._known is not None
        looks, self._looks = self._looks, []
        for name in (name for look in looks if look.differs for name in look.names):
            if not same_bits(_sample(tensors[name]), self._known[name]):
                self._problem = name


def _samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _sample(tensor) for name, tensor in tensors.items()}


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements from all over it, as bytes, where it is."""
    return _elements(tensor).clone().view(torch.uint8)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]
