"""The processes of a group of encoders: they are started over MPI or TCP, and end together."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ft.checkpoint.decide import StripeState
from megatron_ft.core.environment import INCARNATION
from megatron_ft.core.errors import NoMpiError
from megatron_ft.core.process_tools import last_word, log_size
from megatron_ft.erasure.worker import ENCODE_RATE
from megatron_ft.erasure.world import MPI, RANK_TRANSPORT, TCP, TCP_REMEDY, tcp_rate
from megatron_ft.launchers.launcher import Launcher, Placement, ProcessHandle
from megatron_ft.launchers.launcher_env import base_environment
from megatron_ft.supervisor.spec import JobSpec
from megatron_ft.supervisor.tcp_encoders import TcpEncoders

AUTO = "auto"
TRANSPORTS = (AUTO, MPI, TCP)


class EncoderStarter:
    """Starts worlds through a launcher over the transport that is wished: one of TRANSPORTS.

    ``auto`` is MPI where one can be loaded, else TCP.  An MPI that is there and does not work
    is an error all the same: it is for `megatron-ft doctor` to find out on which node.
    ``no_mpi`` is the reason why there is none, once it is known.
    """

    def __init__(self, launcher: Launcher, wish: str = AUTO) -> None:
        self._launcher, self._wish = launcher, wish
        self.no_mpi, self._warned = "", False

    @property
    def over_tcp(self) -> bool:
        """True if worlds use TCP, as far as is known."""
        return self._wish == TCP or bool(self.no_mpi)

    def describe(self) -> str:
        """Describe for the log why TCP is used."""
        why = f"no MPI can be loaded: {self.no_mpi}" if self.no_mpi else "--transport asks for it"
        return f"encoders use TCP, encrypted and authenticated; {why}"

    def slow(self, stripes: Iterable[StripeState], places: Mapping[str, str]) -> str:
        """Warning of the rate of TCP, once: the longest shard, and the ranks of its node."""
        if not self.over_tcp or self._warned:
            return ""
        longest = max(stripes, key=lambda stripe: stripe.data_bytes, default=None)
        if longest is None or not longest.parity_members:
            return ""
        ranks = max(Counter(places.values()).values(), default=1)
        slow = tcp_rate(longest.data_bytes, ranks)
        self._warned = bool(slow)
        return slow and f"{slow}; {TCP_REMEDY}"

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
        return TcpEncoders.start(self._launcher, placements, log_path)

    def _settle_without(self, error: NoMpiError) -> None:
        if self._wish == MPI:
            raise error
        self.no_mpi = str(error)


class EncodersAhead(NamedTuple):
    """A world that was started ahead, for these nodes and this incarnation."""

    nodes: tuple[str, ...]
    incarnation: int
    name: str
    handle: ProcessHandle


class EncoderProcesses:
    """The disposable world: started over the active nodes, again whenever it breaks."""

    def __init__(self, launcher: Launcher, spec: JobSpec) -> None:
        self._spec = spec
        self.starter = EncoderStarter(launcher, spec.settings.transport)
        self._log, self._log_begin = spec.log_dir / "encoders.log", 0
        self._handle: ProcessHandle | None = None
        self.ahead: EncodersAhead | None = None
        self.name = ""

    def start(self, nodes: Sequence[str], incarnation: int) -> str:
        """Start a world with these nodes as ranks 0, 1, ...; returns its name."""
        self.kill()
        self.name, self._handle = self._start(nodes, incarnation)
        return self.name

    def start_ahead(self, nodes: Sequence[str], incarnation: int) -> str:
        """Start one for an incarnation to come, beside the present one; its name."""
        self.drop_ahead()
        name, handle = self._start(nodes, incarnation)
        self.ahead = EncodersAhead(tuple(nodes), incarnation, name, handle)
        return name

    def take_ahead(self, nodes: Sequence[str], incarnation: int) -> bool:
        """Use the world that was started ahead, if it runs and is for these; else end it."""
        ahead = self.ahead
        if ahead is None or ahead[:2] != (tuple(nodes), incarnation) or not ahead.handle.alive():
            self.drop_ahead()
            return False
        self.kill()
        self.name, self._handle, self.ahead = ahead.name, ahead.handle, None
        return True

    def drop_ahead(self) -> None:
        """End the world that was started ahead, if there is one."""
        if self.ahead is not None:
            self.ahead.handle.kill()
            self.ahead = None

    def _start(self, nodes: Sequence[str], incarnation: int) -> tuple[str, ProcessHandle]:
        name = f"w{incarnation}-{uuid.uuid4().hex[:6]}"
        argv = [sys.executable, "-m", "megatron_ft.erasure.worker", "--world", name]
        environment = {**base_environment(), INCARNATION: str(incarnation), "OMP_NUM_THREADS": "1"}
        environment[ENCODE_RATE] = str(self._spec.settings.encode_bandwidth_mib * (1 << 20))
        placements = [Placement(node, argv, environment) for node in nodes]
        self._log_begin = log_size(self._log)
        return name, self.starter.start(placements, self._log)

    async def ended(self) -> int:
        """Wait until the world is gone; its exit status."""
        assert self._handle is not None
        return await self._handle.wait()

    def why_ended(self, status: int) -> str:
        """The last line of its log; ``status`` is what ``ended`` gave."""
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}; {self._log} says: {last_word(self._log, self._log_begin)}"

    def end(self, name: str) -> None:
        """End the world if that is its name; ``ended`` returns once its processes are gone."""
        if self._handle is not None and name == self.name:
            self._handle.kill()

    def kill(self) -> None:
        """End the world, if there is one, and forget it."""
        self.end(self.name)
        self._handle = None
