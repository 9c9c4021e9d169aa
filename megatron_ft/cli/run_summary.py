"""The last lines of ``megatron-ft run``: what recoveries cost, and what is on disk."""

from __future__ import annotations

from megatron_ft.supervisor.events import JobEvent

_HEADS = {
    "detect": "detect",
    "kill": "kill",
    "decide": "decide",
    "launch": "launch",
    "imports": "import",
    "communicators": "connect",
    "set_up": "set up",
    "restore": "restore",
    "first_iteration": "iterate",
}
_MOST_ROWS = 20


class RunSummary:
    """An observer that remembers what is worth saying at the end."""

    def __init__(self) -> None:
        self._recoveries: list[JobEvent] = []
        self._places: dict[str, str] = {}

    def __call__(self, event: JobEvent) -> None:
        """Take note of an event."""
        if event.kind == "recovered":
            self._recoveries.append(event)
        elif event.kind == "drained":
            self._places["on disk"] = f"iteration {event.fields['iteration']}: " + str(
                event.fields["folder"]
            )
        elif event.kind == "exported":
            self._places["exported"] = event.text

    def lines(self) -> list[str]:
        """A table of recoveries, if there were any, and where the newest files are."""
        places = [f"{name}: {place}" for name, place in self._places.items()]
        return self._table() + places

    def _table(self) -> list[str]:
        if not self._recoveries:
            return []
        shown = self._recoveries[-_MOST_ROWS:]
        head = f"{'total':>8}" + "".join(f"{name:>9}" for name in _HEADS.values())
        rows = [
            f"{event.fields['total']:8.2f}"
            + "".join(f"{event.fields[name]:9.2f}" for name in _HEADS)
            for event in shown
        ]
        return [f"recoveries: {len(self._recoveries)}; seconds, of the slowest rank:", head, *rows]
