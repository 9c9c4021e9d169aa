"""Run by ``site`` in every Python process of a trainer: snapshots for an unedited script.

Nothing of Megatron, torch or this package is imported here, as most of these processes are
no trainers (compilers, data tools, spawned workers).  When one imports Megatron's training
loop, the hooks go in right behind that import.  A ``sitecustomize`` that this one hides
runs as well.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than all the rest here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

LOOP = "megatron.training.training"
COMMUNICATORS = "torch.distributed.distributed_c10d"
DEEPSPEED = "deepspeed"
"""Not its engine's module: what that needs of the package is complete only behind all of it."""

SUPERVISED = "MEGATRON_FT_JOB"
"""megatron_ft.core.environment.JOB, which cannot be imported as cheaply."""


class AfterImport:
    """A finder that finds one module as the others do and calls a function behind its body.

    The function runs before anybody can import a name from that module; an error of it
    fails the import.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call
        self._asking = False

    def install(self) -> None:
        """Be asked first; what is installed later is asked earlier and calls later."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' answer with a loader that makes the call, for this module only."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            finders = [f for f in sys.meta_path if hasattr(f, "find_spec")]
            answers = (finder.find_spec(fullname, path, target) for finder in finders)
            spec = next((answer for answer in answers if answer is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            # A duck: deriving from importlib.abc.Loader would import it in every process.
            spec.loader = _CallingLoader(spec.loader, self._call)  # type: ignore[assignment]
        return spec


class _CallingLoader:
    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call()


def run_hidden(folder: str) -> None:
    """Run the ``sitecustomize`` that the one in ``folder`` hides, if there is one.

    It takes the place in ``sys.modules``.  Its errors are reported by ``site``, as ever.
    """
    from importlib.machinery import PathFinder

    # Behind it only: what lies before it has run, and may be what runs this one.
    path = [os.path.abspath(entry) for entry in sys.path]
    behind = path[path.index(folder) + 1 :] if folder in path else []
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def install_snapshots() -> None:
    """Megatron's loop was imported here: wrap it, where this interpreter has the package."""
    try:
        from megatron_ft.megatron.hooks import install_for_script
    except ModuleNotFoundError as error:
        say_if_not_installed(error, "Megatron will not know --inmem-snapshot")
        return
    install_for_script(sys.argv)


def install_in_engine() -> None:
    """DeepSpeed was imported here: wrap its engine, where this interpreter has the package."""
    try:
        from deepspeed_ext.hooks import install
    except ModuleNotFoundError as error:
        say_if_not_installed(error, 'DeepSpeed will ignore "inmem_snapshot"')
        return
    install()


def time_communicators() -> None:
    """torch.distributed was imported here: measure how long it takes to connect the ranks."""
    from importlib.util import find_spec

    if find_spec("megatron_ft") is not None:
        from megatron_ft.trainer.heartbeats import time_communicators

        time_communicators()


def say_if_not_installed(error: ModuleNotFoundError, consequence: str) -> None:
    """Say what follows if it is this package that is missing; raise any other error again."""
    if (error.name or "").partition(".")[0] not in ("megatron_ft", "deepspeed_ext"):
        raise error
    print(
        f"megatron-ft: not installed for {sys.executable}, which trains: install it there, or "
        f"{consequence}",
        file=sys.stderr,
    )


if __name__ == "sitecustomize":  # not where its parts are imported
    if SUPERVISED in os.environ:
        AfterImport(LOOP, install_snapshots).install()
        AfterImport(DEEPSPEED, install_in_engine).install()
        AfterImport(COMMUNICATORS, time_communicators).install()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
