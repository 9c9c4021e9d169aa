"""Which of the nodes this is, as the launcher says that started us once on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_ft.core.errors import ConfigError

# torchrun and deepspeed; Open MPI; MPICH, its descendants and srun --mpi=pmi2; srun.
_SOURCES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"


class NodeRank(NamedTuple):
    """Number of this node, from 0, and how many there are, spares included."""

    rank: int
    size: int


def node_rank(
    environment: Mapping[str, str], rank: int | None = None, size: int | None = None
) -> NodeRank:
    """From flags, where given, else from the first launcher that is seen to be around us.  Pure.

    ConfigError where nobody says it, and where torchrun would start us again.
    """
    if environment.get(_RESTARTS, "0") != "0":
        raise ConfigError(
            f"the launcher around megatron-ft run would restart it ({_RESTARTS}="
            f"{environment[_RESTARTS]}): give torchrun --max-restarts 0, and deepspeed no "
            "--enable_elastic_training; megatron-ft run restarts the trainers itself"
        )
    for names in _SOURCES:
        found = [environment.get(name, "") for name in names]
        if rank is None and all(text.isdecimal() for text in found):
            rank, size = int(found[0]), int(found[1])
    if rank is None or size is None:
        sources = ", ".join("/".join(names) for names in _SOURCES)
        raise ConfigError(
            "--launcher nodes does not know which node this is: start it once on each node with "
            f"mpirun, srun, torchrun or deepspeed ({sources}), or give --node-rank and --nodes"
        )
    if not 0 <= rank < size:
        raise ConfigError(f"node rank {rank} is not below the number of nodes, {size}")
    return NodeRank(rank, size)
