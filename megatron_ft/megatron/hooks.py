"""The functions of Megatron's loop that are wrapped, and nothing else of it.

Megatron's loop calls these by bare name in one module, so replacing attributes of that
module reaches every caller, and no file of Megatron is edited.  Only parameter *names*
are relied on, and they are checked when the wraps go in.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron_ft.config import SWITCH, SnapshotConfig
from megatron_ft.core.environment import RESTORE, START
from megatron_ft.core.errors import ConfigError, UnsupportedVersionError
from megatron_ft.core.frameworks import Function, wrap
from megatron_ft.megatron import arguments, own_checkpoints, reentry
from megatron_ft.megatron.run import SnapshotRun, make_manager, without_disk_load
from megatron_ft.megatron.versions import check_megatron
from megatron_ft.trainer.resilient import run_resilient
from megatron_ft.trainer.teardown import on_teardown

if TYPE_CHECKING:
    from megatron_ft.trainer.manager import SnapshotManager

ManagerFactory = Callable[[SnapshotConfig], "SnapshotManager"]

_current: SnapshotRun | None = None
"""The run between its set-up and its end; wraps hold no reference of their own to it."""


def install(manager_factory: ManagerFactory = make_manager) -> None:
    """Wrap Megatron's functions in this process; a second call changes nothing.

    Call it before Megatron parses its arguments.  Imports Megatron, so on a machine
    without CUDA the stand-in has to be in place.  Raises UnsupportedVersionError, naming
    releases that work, if this one lacks something.
    """
    check_megatron()
    reentry.install(run_resilient)
    on_teardown(_forget_current)
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.training import arguments as megatron_arguments
    from megatron.training import initialize, training, yaml_arguments

    wrap(megatron_arguments, "add_megatron_arguments", _with_flags)
    for module in (megatron_arguments, yaml_arguments, initialize):
        for name in ("validate_args", "validate_yaml"):
            # Up to 0.17 `initialize` has names of its own for both.
            if hasattr(module, name):
                wrap(module, name, _with_checks)
    setup = functools.partial(_with_restore, manager_factory)
    wrap(training, "setup_model_and_optimizer", setup)
    wrap(training, "train", _with_end)
    wrap(training, "checkpoint_and_decide_exit", _with_capture)
    for name, how in (
        ("evaluate_and_print_results", _with_pause),
        ("save_checkpoint_and_time", _with_note),
    ):
        if hasattr(training, name):
            wrap(training, name, how)
    _read_help_once()
    for name in ("offload_to_cpu", "restore_from_cpu"):
        if hasattr(MegatronOptimizer, name):
            wrap(MegatronOptimizer, name, _at_rest)


def install_for_script(argv: Sequence[str] | None = None) -> None:
    """Install the hooks in a script that did not ask for them itself.

    Raises UnsupportedVersionError only if ``argv`` (this process's by default) asks for
    snapshots.  Any other program that imports this Megatron under a supervisor continues
    without them, with a warning.
    """
    if os.environ.get(START) == "warm":
        _begin_clock()
    try:
        install()
    except UnsupportedVersionError as error:
        if any(flag.startswith("--inmem-") for flag in (sys.argv if argv is None else argv)):
            raise
        print(f"megatron-ft: {error}", file=sys.stderr)


def _begin_clock() -> None:
    """Megatron's times of its import, from which --exit-duration-in-mins counts, become now."""
    from megatron.training import training

    for name in ("_TRAIN_START_TIME", "_LEGACY_TRAIN_START_TIME"):
        if hasattr(training, name):
            setattr(training, name, time.time())


def _read_help_once() -> None:
    """Each parser reads the sources of classes for its help, which is most of a parser's time."""
    from megatron.training import argument_utils

    # A private name: with a release that has another one, starts take longer.
    factory = getattr(argument_utils, "ArgumentGroupFactory", None)
    if hasattr(factory, "_get_field_docstrings"):
        wrap(factory, "_get_field_docstrings", _once_a_class)


def _once_a_class(original: Function) -> Function:
    known: dict[type, dict[str, str]] = {}

    def docstrings(self: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = original(self, source)
        return dict(known[source])

    return docstrings


def _with_flags(original: Function) -> Function:
    def add_arguments(parser: Any) -> Any:
        return arguments.add_snapshot_arguments(original(parser))

    return add_arguments


def _with_checks(original: Function) -> Function:
    """Checks after Megatron's own: arguments are complete, nothing is built, no port is open."""

    def validate(*args: Any, **kwargs: Any) -> Any:
        options = original(*args, **kwargs)
        arguments.check(options, sys.argv[1:])
        return options

    return validate


def _with_restore(manager_factory: ManagerFactory, original: Function) -> Function:
    def setup(*args: Any, **kwargs: Any) -> Any:
        options = _options()
        if not arguments.is_enabled(options):
            return original(*args, **kwargs)
        config = arguments.validate(options)
        run = SnapshotRun(options, manager_factory(config))
        try:
            built = _build(run, options, lambda: original(*args, **kwargs))
            run.attach(*built[:3])
        except BaseException:
            run.close()
            raise
        _replace_current(run)
        return built

    return setup


def _build(run: SnapshotRun, options: Any, build: Callable[[], Any]) -> Any:
    if not run.starts_from_memory():
        return build()
    with without_disk_load(options):
        return build()


def _with_end(original: Function) -> Function:
    signature = inspect.signature(original)

    def train(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            _refuse_to_train_unprotected()
            return original(*args, **kwargs)
        _current.begin_training(signature.bind(*args, **kwargs).arguments)
        try:
            result = original(*args, **kwargs)
            _current.end_training(result[0])
            return result
        except SystemExit as leaving:
            # --exit-interval, --exit-duration-in-mins, --exit-signal-handler.
            if not leaving.code:
                _current.end_training()
            raise
        finally:
            _replace_current(None)

    return train


def _refuse_to_train_unprotected() -> None:
    """ConfigError under a supervisor: as no rank registers, it would end the job in minutes."""
    # Said to the trainers of every incarnation, and to no others of the same fleet.
    if RESTORE in os.environ:
        raise ConfigError(
            f"this training was started by `megatron-ft run`, but takes no snapshots: add "
            f"{SWITCH} to its flags (with --yaml-cfg: `inmem_snapshot: true` to that file), or "
            "start it without `megatron-ft run`"
        )


def _with_capture(original: Function) -> Function:
    signature = inspect.signature(original)

    def decide_exit(*args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            # Before the original, which may write a checkpoint for minutes or end the run.
            given = signature.bind(*args, **kwargs).arguments
            _current.end_iteration(
                given["iteration"],
                given["num_floating_point_operations_so_far"],
                given["train_data_iterator"],
            )
        return original(*args, **kwargs)

    return decide_exit


def _inside(
    context: Callable[[SnapshotRun], AbstractContextManager[None]], original: Function
) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if _current is None else context(_current):
            return original(*args, **kwargs)

    return call


_with_pause = functools.partial(_inside, SnapshotRun.pause)
_at_rest = functools.partial(_inside, SnapshotRun.at_rest)


def _with_note(original: Function) -> Function:
    signature, paused = inspect.signature(original), _with_pause(original)

    def save(*args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            given = signature.bind(*args, **kwargs).arguments
            own_checkpoints.note_save(_options(), given["iteration"])
        return paused(*args, **kwargs)

    return save


def _forget_current() -> None:
    _replace_current(None)


def _replace_current(run: SnapshotRun | None) -> None:
    global _current
    if _current is not None:
        _current.close()
    _current = run


def _options() -> Any:
    from megatron.training import get_args

    return get_args()
