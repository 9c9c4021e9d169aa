"""Which transport encoder worlds use, and starting them over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ft.core.errors import NoMpiError
from megatron_ft.erasure.world import MPI, RANK_TRANSPORT, TCP
from megatron_ft.launchers.launcher import Launcher, Placement, ProcessHandle
from megatron_ft.supervisor.tcp_world import TcpWorldProcess

AUTO = "auto"
TRANSPORTS = (AUTO, MPI, TCP)


class WorldStarter:
    """Starts worlds through a launcher over the transport that is wished: one of TRANSPORTS.

    ``auto`` is MPI where one can be loaded, else TCP.  An MPI that is there and does not work
    is an error all the same: it is for `megatron-ft doctor` to find out on which node.
    ``no_mpi`` says why there is none, once that is known.
    """

    def __init__(self, launcher: Launcher, wish: str = AUTO) -> None:
        self._launcher, self._wish = launcher, wish
        self.no_mpi = ""

    @property
    def over_tcp(self) -> bool:
        """Whether worlds use TCP, as far as is known."""
        return self._wish == TCP or bool(self.no_mpi)

    def describe(self) -> str:
        """For the log, which transport is used and why."""
        if not self.over_tcp:
            return "encoders use MPI"
        why = f"no MPI can be loaded: {self.no_mpi}" if self.no_mpi else "--transport asks for it"
        return f"encoders use TCP, encrypted and authenticated; {why}"

    def check(self, ranks: int) -> None:
        """Choose, and prove that an MPI that is to be used starts a world of so many ranks.

        Raises MpiError if it does not, or if there is none and the wish is MPI.
        """
        if not self.over_tcp:
            try:
                self._launcher.check_world(ranks)
            except NoMpiError as error:
                self._settle_without(error)

    def start(self, placements: Sequence[Placement], log_path: Path) -> ProcessHandle:
        """Start one world: rank i of it is ``placements[i]``; see Launcher.start_world."""
        if not self.over_tcp:
            try:
                marked = [p._replace(env={**p.env, RANK_TRANSPORT: MPI}) for p in placements]
                return self._launcher.start_world(marked, log_path)
            except NoMpiError as error:
                self._settle_without(error)
        return TcpWorldProcess.start(self._launcher, placements, log_path)

    def _settle_without(self, error: NoMpiError) -> None:
        if self._wish == MPI:
            raise error
        self.no_mpi = str(error)
