"""What the supervisor tells each process it starts, as environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.core.errors import NotUnderSupervisorError

JOB = "MEGATRON_FT_JOB"
NODE = "MEGATRON_FT_NODE"
NODE_DIR = "MEGATRON_FT_NODE_DIR"
INCARNATION = "MEGATRON_FT_INCARNATION"

TREE = "MEGATRON_FT_TREE"
"""Names all that one start has led to, also what made a session of its own or lost its parent.

Whoever starts something that starts others sets it; the launcher ends all of them together.
"""

RESTORE = "MEGATRON_FT_RESTORE"
"""Where an incarnation's state comes from: "memory", or "disk" for the framework's own checkpoint.

"rewound" is memory, too, even where the framework has a newer checkpoint: that one is of what
was given up.
"""

SOCKET_NAME = "smp.sock"
READY_NAME = "smp.json"


@dataclass(frozen=True)
class ProcessEnvironment:
    """Where a supervised process is: its job, node, the node's folder, the job's incarnation.

    ``node_dir`` holds the SMP's socket and the arenas.
    """

    job: str
    node: str
    node_dir: Path
    incarnation: int

    @property
    def socket(self) -> Path:
        """Path of the SMP's Unix socket on this node."""
        return self.node_dir / SOCKET_NAME

    def variables(self) -> dict[str, str]:
        """The environment variables that carry this to a child."""
        return {
            JOB: self.job,
            NODE: self.node,
            NODE_DIR: str(self.node_dir),
            INCARNATION: str(self.incarnation),
        }

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> ProcessEnvironment:
        """Read the variables back; NotUnderSupervisorError if one is missing."""
        source = os.environ if environment is None else environment
        missing = [n for n in (JOB, NODE, NODE_DIR, INCARNATION) if n not in source]
        if missing:
            raise NotUnderSupervisorError(
                f"{', '.join(missing)} not set: start the training command with "
                "`megatron-ft run -- <command>`, which starts the SMP that keeps snapshots"
            )
        return cls(source[JOB], source[NODE], Path(source[NODE_DIR]), int(source[INCARNATION]))
