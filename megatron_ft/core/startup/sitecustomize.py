"""Run by ``site`` in every Python process of a trainer: snapshots for an unedited script.

Nothing of Megatron, torch or this package is imported here, as most of these processes are
no trainers (compilers, data tools, spawned workers).  When one imports a module that an
environment variable names, a hook runs right behind that import.  A ``sitecustomize`` that
this one hides runs as well.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than all the rest here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

AFTER_IMPORT = "MEGATRON_FT_AFTER_IMPORT"
"""megatron_ft.core.startup.AFTER_IMPORT, which cannot be imported as cheaply."""

REFUSED, UNAVAILABLE = 78, 69
"""Those of megatron_ft.core.startup, which says what they mean."""

HOST = "MEGATRON_FT_HOST_ROOM"
"""Variable of trainer hosts alone: the trainers that they fork run all this, they do not."""


class AfterImport:
    """A finder that finds one module as the others do and calls a function behind its body.

    The function runs before anybody can import a name from that module; an error of it
    fails the import.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call
        self._asking = False

    def install(self) -> None:
        """Become the first finder; one that is installed later is asked earlier and calls later.

        A module that is there already, as a trainer host had imported it, is called behind at once.
        """
        if self._name in sys.modules:
            self._call()
        else:
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


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call a function behind a module's import: now, if the trainer host had imported it."""
    if name in sys.modules:
        call()
    else:
        AfterImport(name, call).install()


def run_hidden(folder: str) -> None:
    """Run the ``sitecustomize`` that the one in ``folder`` hides, if there is one.

    It takes the place in ``sys.modules``.  ``site`` reports its errors.
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


def call_hook(watched: str, hook: str) -> None:
    """Call the function ``module:function``, where this interpreter has the module.

    Where it lacks the package, that is said.
    """
    from importlib import import_module

    module, _, function = hook.partition(":")
    try:
        call = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] not in (package, "megatron_ft"):
            raise
        print(
            f"megatron-ft: not installed for {sys.executable}, which trains: install it there, "
            f"or {watched} will know nothing of snapshots",
            file=sys.stderr,
        )
        return
    call()


def watch(hooks: str) -> None:
    """Have each of ``watched=module:function`` called; they are separated by commas."""
    for entry in filter(None, hooks.split(",")):
        watched, _, hook = entry.partition("=")
        after_import(watched, lambda w=watched, h=hook: call_hook(w, h))  # type: ignore[misc]


def end_with_codes() -> None:
    """Have this process end with a code of its own after an error that another start meets again.

    torch's hook around this one keeps what is printed until this returns, which it does not.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = code_of(error)
        stderr = sys.stderr
        if code:
            sys.stderr = sys.__stderr__ or stderr
        try:
            before(kind, error, trace)
        finally:
            sys.stderr = stderr
        if code:
            raise SystemExit(code)

    sys.excepthook = hook
    after_import("runpy", name_missing_modules)


def code_of(error: BaseException) -> int:
    """REFUSED, UNAVAILABLE, or 0 where another start may end otherwise.

    torchrun ends with that of the rank that failed first.
    """
    if type(error).__name__ == "ChildFailedError" and hasattr(error, "get_first_failure"):
        code: int = error.get_first_failure()[1].exitcode
        return code if code in (REFUSED, UNAVAILABLE) else 0
    if getattr(error, "lasting", False):
        return REFUSED
    return UNAVAILABLE if isinstance(error, (ImportError, SyntaxError)) else 0


def name_missing_modules() -> None:
    """Have ``python -m`` end with UNAVAILABLE where there is no such module."""
    runpy: Any = sys.modules["runpy"]
    find = runpy._get_module_details

    def found(name: str, error: type[Exception] = ImportError) -> Any:
        try:
            return find(name, error)
        except runpy._Error as missing:
            print(f"{sys.executable}: {missing}", file=sys.stderr)
            raise SystemExit(UNAVAILABLE) from None

    runpy._get_module_details = found


if __name__ == "sitecustomize" and HOST not in os.environ:  # not where its parts are imported
    if hooks := os.environ.get(AFTER_IMPORT, ""):
        end_with_codes()
        watch(hooks)
    run_hidden(os.path.dirname(os.path.abspath(__file__)))
