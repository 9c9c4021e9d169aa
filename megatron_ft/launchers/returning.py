"""Lost nodes that come back by themselves, for a job that waits for hosts."""

from __future__ import annotations

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.launchers.launcher import Launcher


class ReturningHosts:
    """Nodes of ``launcher`` that are away; ``seconds`` is the longest wait for them."""

    def __init__(self, launcher: Launcher, seconds: float) -> None:
        self.seconds = seconds
        self._launcher, self._away = launcher, list[str]()

    def request(self, count: int) -> str:
        """Name the nodes that are waited for; ControlPlaneError if too few are known to be away."""
        self._away = [n for n in self._launcher.nodes() if not self._launcher.reachable(n)]
        if len(self._away) < count:
            raise ControlPlaneError(f"{len(self._away)} nodes are known to be away, not {count}")
        return f"{' or '.join(self._away)} again"

    def arrived(self) -> list[str]:
        """Nodes that came back since this was asked before."""
        back = [node for node in self._away if self._launcher.reachable(node)]
        self._away = [node for node in self._away if node not in back]
        return back

    def withdraw(self) -> None: ...
