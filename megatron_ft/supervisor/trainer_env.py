"""The environment of one trainer rank, as torchrun would set it, and that of torchrun itself."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.core.environment import TREE

# The supervisor restarts all ranks itself, and torch must not look for an agent's store.
_FIXED = {
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "ROLE_NAME": "default",
}
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True)
class TrainerPlace:
    """Where trainers of one life of the job stand: rank ``local_rank`` of an active node, or all.

    Nodes and the ranks of a node are numbered from 0, ranks node by node.  ValueError for a
    node or a rank out of range.
    """

    node_index: int
    local_rank: int
    node_count: int
    ranks_per_node: int
    master_address: str
    master_port: int
    run_id: str
    restart_count: int

    def __post_init__(self) -> None:
        """Check."""
        nodes, ranks = range(self.node_count), range(self.ranks_per_node)
        if self.node_index not in nodes or self.local_rank not in ranks:
            raise ValueError(
                f"rank {self.local_rank} of node {self.node_index} is not within "
                f"{self.node_count} nodes of {self.ranks_per_node} ranks"
            )

    def of_rank(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of this rank, from ``base``.

        Names and meanings are those of torchrun's documentation ("Environment Variables").
        OMP_NUM_THREADS becomes 1 where ``base`` does not set it.
        """
        rank = str(self.node_index * self.ranks_per_node + self.local_rank)
        world_size = str(self.node_count * self.ranks_per_node)
        return {
            **_DEFAULTS,
            **base,
            **_FIXED,
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_index),
            "GROUP_WORLD_SIZE": str(self.node_count),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
        }

    def of_torchrun(self, base: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of a torchrun that starts all ranks of this node, from ``base``.

        torchrun takes the defaults of its flags from ``PET_<FLAG>``.  It numbers the ranks as
        ``of_rank`` does, and makes a session for each: TREE ends them with it.
        """
        assert self.local_rank == 0, "one process stands for all ranks of a node"
        return {
            **_DEFAULTS,
            **base,
            TREE: uuid.uuid4().hex,
            "PET_NNODES": str(self.node_count),
            "PET_NODE_RANK": str(self.node_index),
            "PET_NPROC_PER_NODE": str(self.ranks_per_node),
            "PET_RDZV_BACKEND": "static",
            "PET_RDZV_ID": f"{self.run_id}-{self.restart_count}",
            "PET_MASTER_ADDR": self.master_address,
            "PET_MASTER_PORT": str(self.master_port),
            "PET_MAX_RESTARTS": "0",
        }
