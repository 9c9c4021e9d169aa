"""The environment of one trainer rank, as torchrun would set it, and that of torchrun itself."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping

from megatron_ft.environment import TREE

# The supervisor restarts all ranks itself, and torch must not look for an agent's store.
_FIXED = {
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "ROLE_NAME": "default",
}
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def trainer_environment(
    base: Mapping[str, str],
    *,
    node_index: int,
    local_rank: int,
    node_count: int,
    ranks_per_node: int,
    master_address: str,
    master_port: int,
    run_id: str,
    restart_count: int,
) -> dict[str, str]:
    """Complete environment of rank ``local_rank`` on active node ``node_index``, from ``base``.

    Ranks are numbered node by node.  Names and meanings are those of torchrun's
    documentation ("Environment Variables").  OMP_NUM_THREADS becomes 1 where ``base`` does
    not set it.  ValueError for a rank or node out of range.
    """
    if not (0 <= node_index < node_count and 0 <= local_rank < ranks_per_node):
        raise ValueError(
            f"rank {local_rank} of node {node_index} is not within {node_count} nodes of "
            f"{ranks_per_node} ranks"
        )
    rank = str(node_index * ranks_per_node + local_rank)
    world_size = str(node_count * ranks_per_node)
    return {
        **_DEFAULTS,
        **base,
        **_FIXED,
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(node_index),
        "GROUP_WORLD_SIZE": str(node_count),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }


def node_environment(
    base: Mapping[str, str],
    *,
    node_index: int,
    local_rank: int,
    node_count: int,
    ranks_per_node: int,
    master_address: str,
    master_port: int,
    run_id: str,
    restart_count: int,
) -> dict[str, str]:
    """Complete environment of a torchrun that starts all ranks of an active node, from ``base``.

    torchrun takes the defaults of its flags from ``PET_<FLAG>``.  It numbers the ranks as
    ``trainer_environment`` does, and makes a session for each: TREE ends them with it.
    """
    assert local_rank == 0, "one process stands for all ranks of a node"
    return {
        **_DEFAULTS,
        **base,
        TREE: uuid.uuid4().hex,
        "PET_NNODES": str(node_count),
        "PET_NODE_RANK": str(node_index),
        "PET_NPROC_PER_NODE": str(ranks_per_node),
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": f"{run_id}-{restart_count}",
        "PET_MASTER_ADDR": master_address,
        "PET_MASTER_PORT": str(master_port),
        "PET_MAX_RESTARTS": "0",
    }


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free on ``address`` just now; somebody else may take it meanwhile.

    Ask for a new one at every start: the old one may linger in TIME_WAIT.
    """
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
