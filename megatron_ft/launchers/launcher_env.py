"""Environments without the variables of the launcher that started us.

``megatron-ft run`` may itself have been started by srun, mpirun, torchrun or ``deepspeed``.  Their
variables say of a process which rank it is; a process that we start is another rank, or none.  All
environments of processes that we start begin with ``base_environment``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Schedulers and other launchers that mpirun would obey: it would look for their daemons, or
# believe that it is itself a rank.
_PREFIXES = (
    "SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "MPI_LOCAL", "HYDRA_", "HYDI_",
    "OMPI_", "PRTE_", "ORTE_", "PALS_", "FLUX_", "PBS_", "LSB_",
)  # fmt: skip
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "PET_", "ROLE_")
# Of torchrun, of DeepSpeed's launcher (the last three), and of scripts around them.
_PLACES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
     "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")
)  # fmt: skip
# DeepSpeed's launcher, told to start one process on a node, shows it the first device only.
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"})
_DEEPSPEED = "CROSS_SIZE"

KEPT = frozenset(
    ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NAME", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
)
"""Names of a scheduler's job; MPI launchers do not get even these."""

# Variables that a user sets to tune MPI, and an outer mpirun sets too.
_TUNING = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_INSIDE_ANOTHER = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")

_STEP_PREFIXES = ("SLURM_", "SRUN_", "SBATCH_", "PMI_", "PMI2_", "PMIX_")

STEP_PLACES = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_NNODES", "SLURM_GTIDS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEPID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
"""A step's place in its job; torch, DeepSpeed and MPI would take it for a rank's place."""


def base_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that processes of ours start from: without another launcher's variables.

    KEPT stay, and a user's own tuning of MPI, unless an outer launcher may have put it there.
    """
    dropped = _DEVICES if _DEEPSPEED in environment else frozenset[str]()
    kept = _tuning(environment)
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT
        or name.startswith(kept)
        or not (
            name in _PLACES or name in dropped or name.startswith(_PREFIXES + _TORCHRUN_PREFIXES)
        )
    }


def without_outer_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an MPI launcher: it must not see a scheduler or an outer mpirun at all."""
    kept = _tuning(environment)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(kept) or not name.startswith(_PREFIXES)
    }


def outside_of_steps(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment from which srun takes no options and MPI no place in a world."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not name.startswith(_STEP_PREFIXES)
    }


def _tuning(environment: Mapping[str, str]) -> tuple[str, ...]:
    return () if any(name in environment for name in _INSIDE_ANOTHER) else _TUNING
