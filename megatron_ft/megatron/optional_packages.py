"""What Megatron imports without a guard and a host-only installation lacks.

Training on a device needs the real ones; whoever only reads or writes checkpoints, or
trains on the stand-in for a device, does not.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
import typing
from typing import Any


class _Anything:
    """Stands for any attribute of a stub package; as a decorator it returns the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StubModule(types.ModuleType):
    __version__ = "0.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def supply() -> None:
    """Put stand-ins in the place of what is missing, before Megatron is imported.

    torch's compiler is told to keep still: it believes in any module called triton.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    supply_typing_override()
    stub_triton()


def supply_typing_override() -> None:
    """Supply ``typing.override``, the one name of Python 3.12 that Megatron uses."""
    if not hasattr(typing, "override"):
        import typing_extensions

        module: Any = typing
        module.override = typing_extensions.override


def stub_triton() -> None:
    """Make ``import triton`` work where it is not installed, without torch believing in it."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    from torch.utils import _triton

    detection: Any = _triton
    detection.has_triton_package()  # cached: remember "no" before the stub is visible
    detection.has_triton()
    stubs = {name: _StubModule(name) for name in ("triton", "triton.language")}
    for name, module in stubs.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    stubs["triton"].__dict__["language"] = stubs["triton.language"]
