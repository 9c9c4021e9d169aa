"""One tree of errors.  Each message says what was wrong, where, and what to do next."""

from __future__ import annotations

from typing import ClassVar

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding damaged bytes, which may not be UTF-8, or may nest deeper than the stack."""


def explain(error: BaseException) -> str:
    """An error of somebody else's code in one line: its class, its text, or its place without one.

    ``assert`` and errors of C++ come without a text.
    """
    text = str(error) or "no reason given"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not str(error) and trace is not None:
        code = trace.tb_frame.f_code
        text = f"in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {text}"


class MegatronFTError(Exception):
    """Root of all errors that this package raises on purpose.

    ``lasting`` says that the same command would meet it again: a job is not started again then.
    """

    lasting: ClassVar[bool] = False


class ConfigError(MegatronFTError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""

    lasting = True


class UsageError(MegatronFTError, ValueError):
    """A call of the public interface that cannot be right; says which call is."""

    lasting = True


class ProcessChangedError(MegatronFTError):
    """A process is not as a new one any more: what trains in it again would run differently."""


class ProtectionError(ConfigError):
    """The wanted redundancy cannot be built from the failure domains that exist."""


class UnsupportedVersionError(MegatronFTError):
    """A framework's release lacks what we hook into; the message names the versions that work."""

    lasting = True


class MissingEnvironmentError(MegatronFTError):
    """Something outside the package is missing: MPI, ISA-L, a directory, a variable."""


class NotUnderSupervisorError(MissingEnvironmentError):
    """The process was not started by ``megatron-ft run``, so it has no SMP to talk to."""


class MpiError(MissingEnvironmentError):
    """No MPI can be started here, or it gives fewer processes than the stripes need."""


class NoMpiError(MpiError):
    """No MPI can be loaded here, or only one that cannot start worlds on such nodes."""


class UntrustedFileError(MegatronFTError):
    """Somebody else may have made or changed a file, folder or socket; nothing of it was used."""


class ArenaError(MegatronFTError):
    """Root of all that can be wrong with one arena file."""


class ArenaMemoryError(ArenaError):
    """The tmpfs or a memory cgroup has no room; the message prints the arithmetic."""


class NoRoomError(ArenaMemoryError):
    """``node`` has no room for an arena that the job needs there."""

    def __init__(self, reason: str, node: str = "") -> None:
        super().__init__(reason)
        self.node = node


class ArenaForeignError(ArenaError):
    """The arena belongs to another job, another user, or another shard."""


class ArenaVersionError(ArenaError):
    """The arena was written in a format version or byte order that this release cannot read."""


class ArenaTruncatedError(ArenaError):
    """The file is shorter than its own header says."""


class ArenaCorruptError(ArenaError):
    """A header record fails its own hash in both of its copies."""


class LayoutMismatchError(MegatronFTError):
    """The shard that a trainer brings differs from the one that the arena holds."""

    lasting = True


class StateMismatchError(LayoutMismatchError):
    """The same, in what no parallel layout changes: dtypes, optimizers, state of some class."""


class UnencodableError(MegatronFTError, TypeError):
    """A small object of the state cannot be stored; the message names its place and what to do."""

    lasting = True


class UndecodableError(LayoutMismatchError):
    """Stored small objects cannot be read: other bytes, another release, or an unknown class."""


class CorruptBlockError(MegatronFTError):
    """Bytes in memory do not match the digest that was taken when they were captured."""


class ExportError(MegatronFTError):
    """A snapshot cannot become a checkpoint of the training framework; says what is missing."""


class CheckpointSaveError(MegatronFTError):
    """Another rank could not write its part of the training framework's own checkpoint."""


class ControlPlaneError(MegatronFTError):
    """A peer did not answer in time, or refused; the message names it, ``node`` if it is one."""

    def __init__(self, reason: str = "", node: str = "") -> None:
        super().__init__(reason)
        self.node = node


class SchedulerAwayError(ControlPlaneError):
    """The cluster's scheduler does not answer, or does not start what it should."""


class RegistrationError(ControlPlaneError):
    """Ranks did not register in time; ``none`` says that not a single one did."""

    def __init__(self, reason: str, none: bool = False) -> None:
        super().__init__(reason)
        self.none = none


class TransportError(ControlPlaneError):
    """A rank of an encoder world is gone, or sent what was not awaited; the world is over."""


class StaleIncarnationError(ControlPlaneError):
    """The sender belongs to an earlier incarnation of the job and must stop."""


class TransitionRefusedError(ControlPlaneError):
    """The slot is not in a state in which the request makes sense; nothing was changed."""


class PinnedError(TransitionRefusedError):
    """Readers hold the slot that a new snapshot needs."""


class WorldGoneError(TransitionRefusedError):
    """The message belongs to an encoder world that is not, or no longer, the node's."""


class UnrecoverableError(MegatronFTError):
    """No snapshot in memory can be served; the message says which stripe lost what."""


class SnapshotUnavailableError(MegatronFTError):
    """A snapshot cannot be read: a shard is missing or damaged, or it was given up meanwhile."""


class CheckpointDamagedError(SnapshotUnavailableError):
    """A checkpoint on disk lacks a file, or bytes of it are not those that were written."""


class DrainError(MegatronFTError):
    """A snapshot could not be written to disk; what was there before is untouched."""


class RestartBudgetError(MegatronFTError):
    """The job failed too often without progress, or would fail again; the message says how."""


def error_class(name: str) -> type[MegatronFTError]:
    """The error of this module with that name, which travelled in a message.

    ControlPlaneError for a name that is not ours.
    """
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, MegatronFTError):
        return found
    return ControlPlaneError
