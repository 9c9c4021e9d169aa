"""What another launcher left in our environment reaches no process of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.launchers.launcher_env import (
    KEPT,
    base_environment,
    outside_of_steps,
    without_outer_launcher,
)

USERS = {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "ib0", "MEGATRON_FT_PROTECT": "xor:2", "RANKS": "1"}
OUTER = {
    "srun": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "PMI_RANK": "1", "PMIX_RANK": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "x", "PRTE_LAUNCHED": "1"},
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "5"},
    "torchrun": {
        "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "1", "ROLE_RANK": "1",
        "MASTER_ADDR": "h0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "2",
        "TORCHELASTIC_ERROR_FILE": "/outer", "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "deepspeed": {
        "RANK": "1", "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    },
}  # fmt: skip


@pytest.mark.parametrize("outer", list(OUTER))
def test_a_users_variables_stay_and_another_launchers_do_not(outer: str) -> None:
    kept = dict.fromkeys(KEPT, "7")
    assert base_environment(USERS | OUTER[outer] | kept) == USERS | kept


def test_devices_that_a_user_chose_stay() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "2,3", "RANK": "0", "WORLD_SIZE": "2"}
    assert base_environment(chosen) == {"CUDA_VISIBLE_DEVICES": "2,3"}


@given(st.sets(st.sampled_from([*USERS, *sorted(KEPT), *(n for o in OUTER.values() for n in o)])))
def test_whatever_is_scrubbed_once_is_scrubbed(names: set[str]) -> None:
    once = base_environment(dict.fromkeys(names, "1"))
    assert base_environment(once) == once
    assert without_outer_launcher(once).items() <= once.items()
    assert outside_of_steps(once) == once


def test_tuning_of_mpi_stays_unless_an_outer_mpirun_may_have_set_it() -> None:
    tuning = {"OMPI_MCA_btl_tcp_if_include": "ib0", "HYDRA_LAUNCHER": "slurm"}
    assert base_environment(tuning) == {"OMPI_MCA_btl_tcp_if_include": "ib0"}
    assert base_environment(tuning | {"PMIX_RANK": "0"}) == {}
