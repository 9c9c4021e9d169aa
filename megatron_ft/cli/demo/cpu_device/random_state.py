"""The host generator plays the device's.

Random operations on host tensors draw from the default host generator, so the pretended
device state has to be that state: then Megatron's tracker forks and restores what dropout
really uses, and a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader


class _OneGenerator:
    """A list whose every element is the host generator; the number of devices may change."""

    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return torch.cuda.device_count()


def replace_generators() -> None:
    """Answer every ``torch.cuda`` random function from the default host generator."""
    generator = torch.default_generator
    cuda: Any = torch.cuda
    cuda.default_generators = _OneGenerator()
    answers: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        # Functions of our own: torch's compiler refuses to see a built-in under two names.
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "initial_seed": lambda: generator.initial_seed(),
    }
    for module in (cuda, cuda.random):
        for name, answer in answers.items():
            setattr(module, name, answer)
    cuda._lazy_call = lambda callable_, **kwargs: callable_()
    # Megatron warns when the host generator moves inside a fork of the device's: here it must.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def keep_data_loader_off_the_generator() -> None:
    """Iterating a data loader draws its base seed from the host generator.

    With a real device that is not the generator of dropout, so it must not move here either.
    """
    loader: Any = DataLoader
    iterate = loader.__iter__
    generator = torch.default_generator

    @functools.wraps(iterate)
    def iterate_quietly(self: Any) -> Any:
        state = generator.get_state()
        iterator = iterate(self)
        generator.set_state(state)
        return iterator

    loader.__iter__ = iterate_quietly
