"""Kills by the kernel for want of memory, as the memory cgroups of this machine count them.

A process that the OOM killer ends looks like any other that is ended by signal 9.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ft.arena.limits import CGROUP_ROOT, PROC, cgroup_folders

_COUNTERS = ("memory.events", "memory.oom_control")
"""Of version 2, where a group counts those below it too, and of version 1."""


class OomKills:
    """Counts of the memory cgroup of this process and of those above it, since the last look.

    Groups of other machines, and of processes outside of these groups, are not seen.
    """

    def __init__(self, cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = cgroup_root, proc
        self._seen = self._read()

    def look(self) -> str:
        """The group in which most processes were killed since the last look, "" if there is none.

        For the end of a sentence that tells of a death by signal 9.
        """
        now = self._read()
        risen = {group: count - self._seen.get(group, 0) for group, count in now.items()}
        self._seen = now
        count, group = max(((n, str(g)) for g, n in risen.items()), default=(0, ""))
        if count <= 0:
            return ""
        return (
            f"; the kernel has just killed {count} processes of memory cgroup {group} for want of "
            "memory: raise its limit, or use fewer slots or less parity"
        )

    def _read(self) -> dict[Path, int]:
        try:
            membership = (self._proc / "self" / "cgroup").read_text()
        except OSError:
            return {}
        counts = {}
        for folder, _ in cgroup_folders(self._root, membership):
            for name in _COUNTERS:
                count = _oom_kill(folder / name)
                if count is not None:
                    counts[folder] = count
        return counts


def _oom_kill(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(values[0]) if values and values[0].isdecimal() else None
