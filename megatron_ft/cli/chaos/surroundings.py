"""What a chaos job runs in: file systems that are too small, a network that can be cut."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megatron_ft.cli.chaos.cases import Case
from megatron_ft.cli.chaos.job import ChaosCluster, JobFile

_SMALL = {"memory": "192k", "disk": "64k"}
"""Room for an SMP's own files and no arena; for no shard of a checkpoint."""


class Surroundings:
    """Made before the job starts, undone when nothing of it runs any more."""

    def __init__(self, case: Case, job: JobFile, cluster: ChaosCluster) -> None:
        self._victim = case.victim
        self._network = cluster.network
        self._small: Path | None = None
        if case.fault == "full":
            spare = cluster.node_dir(job.node_names[job.nodes])
            self._small = job.drain_dir if case.victim == "disk" else spare

    def prepare(self) -> None:
        """Make the network, or mount what is to be small, which needs root."""
        if self._network is not None:
            self._network.open()
        if self._small is not None:
            self._small.mkdir(mode=0o700, parents=True, exist_ok=True)
            options = f"size={_SMALL[self._victim]},mode=700"
            _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._small))

    def make_room(self) -> None:
        """What was small is large enough now."""
        assert self._small is not None
        _run("mount", "-o", "remount,size=256m", str(self._small))

    def cut(self, node: str) -> None:
        """No packet passes between a node and all others."""
        assert self._network is not None
        self._network.cut(node)

    def delay(self, node: str, milliseconds: float) -> None:
        """Every packet to and from a node takes so much longer; 0 for no longer."""
        assert self._network is not None
        self._network.delay(node, milliseconds)

    def heal(self) -> None:
        """All packets pass again."""
        assert self._network is not None
        self._network.heal()

    def unmount(self) -> None:
        """Give the small file system up, before its folder is removed."""
        if self._small is not None:
            subprocess.run(
                ["umount", "-l", str(self._small)], check=False, stderr=subprocess.DEVNULL
            )

    def close(self) -> None:
        """Remove the network, when no process is left in it."""
        if self._network is not None:
            self._network.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
