"""examples/plain_pytorch.py, whose ranks take no snapshot and start from nothing."""

from __future__ import annotations

from typing import Any

from tests.programs.poisoned_training import load

REASON = "nothing says that the script follows"


def declining(manager: Any) -> Any:
    """The snapshot manager, which takes no snapshot that is offered."""

    class Manager(manager):  # type: ignore[misc]
        def load(self, into: Any) -> int:
            self.decline(REASON)
            return int(super().load(into))

    return Manager


def main() -> None:
    training = load()
    training.SnapshotManager = declining(training.SnapshotManager)
    training.main()


if __name__ == "__main__":
    main()
