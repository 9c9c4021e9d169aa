"""What a model holds that follows from no optimizer: buffers, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch

from megatron_ft.trainer.contents import Contents
from megatron_ft.trainer.enumeration import DENSE
from megatron_ft.trainer.master_tensors import as_captured
from megatron_ft.trainer.module_tree import ModuleTree

BUFFER, FROZEN = "buffer/", "frozen/"
"""Begin the names of captured buffers and of parameters that no optimizer owns."""


class ModelTensors:
    """An engine's model as of the last ``refresh``: its ``tree``, and by name what is captured.

    ``buffers`` are all, those that no state dict would hold included; a shared one once.
    ``frozen`` is this rank's part of all parameters but the owned ones, which follow from masters:
    the frozen ones, and trainable ones that the optimizer was not given; a tied one once.  Nobody
    changes these dicts, which are the same ones while they hold the same tensors.
    """

    def __init__(self, engine: Any, owned: Callable[[], Iterable[torch.Tensor]]) -> None:
        """``owned`` gives the parameters that follow from masters.  Nothing is read yet."""
        self.tree = ModuleTree(lambda: [engine.module])
        self.buffers: dict[str, torch.Tensor] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self._find_owned = owned
        self._owned: set[int] = set()
        self._unowned: dict[str, torch.Tensor] = {}
        self._seen: Contents | None = None

    def refresh(self) -> None:
        """Look at the model as it is now."""
        changed, owned = self.tree.refresh(), set(map(id, self._find_owned()))
        if changed or owned != self._owned:
            self._owned, every = owned, self.tree.parameters.items()
            self._unowned = {f"{FROZEN}{name}": p for name, p in every if id(p) not in owned}
        frozen = self._parts()
        now = Contents.of((frozen, self.tree.buffers))
        if self._seen is None or not self._seen.same(now):
            self._take(frozen, now)

    def forget(self) -> None:
        """Let go of all tensors, until the next ``refresh``."""
        self.tree.forget()
        self.buffers, self.frozen, self._unowned, self._seen = {}, {}, {}, None

    def _parts(self) -> dict[str, torch.Tensor]:
        # ZeRO-3 leaves an empty tensor in the model, and its partition beside it.
        whole = self._unowned.values()
        parts = map(getattr, whole, repeat("ds_tensor"), whole)
        return dict(zip(self._unowned, parts, strict=True))

    def _take(self, frozen: dict[str, torch.Tensor], now: Contents) -> None:
        buffers = self.tree.buffers.items()
        self.frozen = {name: as_captured(tensor) for name, tensor in frozen.items()}
        self.buffers = {f"{BUFFER}{name}": as_captured(tensor) for name, tensor in buffers}
        # A view that is made of anything else would be of the memory that this had then.
        self._seen = now if DENSE.issuperset(map(type, now.values)) else None
