"""The trainers' environment, against the definition of its variables and against torch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.supervisor.processes import TrainerPlace


def environment(
    base: dict[str, str], node: int, local: int, nodes: int, per_node: int
) -> dict[str, str]:
    place = TrainerPlace(
        node_index=node,
        local_rank=local,
        node_count=nodes,
        ranks_per_node=per_node,
        master_address="127.0.0.1",
        master_port=4321,
        run_id="job",
        restart_count=2,
    )
    return place.of_rank(base)


@given(st.integers(1, 5), st.integers(1, 5))
def test_ranks_are_numbered_node_by_node(nodes: int, per_node: int) -> None:
    places = [(node, local) for node in range(nodes) for local in range(per_node)]
    all_ranks = [environment({}, node, local, nodes, per_node) for node, local in places]
    assert [int(e["RANK"]) for e in all_ranks] == list(range(nodes * per_node))
    assert all(
        int(e["RANK"]) == int(e["GROUP_RANK"]) * per_node + int(e["LOCAL_RANK"]) for e in all_ranks
    )
    assert {e["WORLD_SIZE"] for e in all_ranks} == {str(nodes * per_node)}
    assert {e["GROUP_WORLD_SIZE"] for e in all_ranks} == {str(nodes)}


def test_base_is_kept_and_an_outer_place_does_not_mislead() -> None:
    base = {"PATH": "/bin", "RANK": "77", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = environment(base, 1, 0, 2, 1)
    assert env["PATH"] == "/bin" and env["RANK"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2" and env["TORCHELASTIC_MAX_RESTARTS"] == "0"
    assert environment({"OMP_NUM_THREADS": "8"}, 0, 0, 1, 1)["OMP_NUM_THREADS"] == "8"
