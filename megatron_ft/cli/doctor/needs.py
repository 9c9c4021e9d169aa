"""How large the job's shards will be, before anything runs.  Pure.

A shard under Adam with a distributed optimizer is the fp32 master and two moments, 12 bytes
for each parameter of the rank's share; weights in bf16 follow from the masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ft.arena.format import BLOCK_BYTES, Geometry
from megatron_ft.core.scheme import Scheme
from megatron_ft.erasure.stripes import Domains, members_of, stripe_sets

BYTES_PER_PARAMETER = 12
_GIB = 1 << 30


class ShardSize(NamedTuple):
    """Bytes of state of one rank, None if unknown, and where the number comes from."""

    size: int | None
    source: str


def shard_size(
    shard_gib: float | None, parameters: float | None, command: Sequence[str], ranks: int
) -> ShardSize:
    """From what the user gives, else from the model's shape in the training command."""
    if shard_gib is not None:
        return ShardSize(round(shard_gib * _GIB), "--shard-gib")
    source = f"--parameters {parameters:g}" if parameters is not None else ""
    if parameters is None:
        parameters = parameters_of(command)
        source = f"{parameters:.4g} parameters by the flags of the training command"
    if not parameters:
        return ShardSize(None, "")
    share = round(BYTES_PER_PARAMETER * parameters / ranks)
    return ShardSize(share, f"{source} x {BYTES_PER_PARAMETER} bytes / {ranks} ranks")


def parameters_of(command: Sequence[str]) -> float:
    """Parameters of a dense GPT by Megatron's flags, 0 where they do not tell.

    Per layer: attention 2 h^2 (1 + g/a) for g of a heads with keys and values of their own,
    MLP 2 h f, or 3 h f gated; then the vocabulary times h, twice if it is not shared.
    Biases and norms are below one in a thousand of that and left out.
    """
    flags = _flags(command)
    layers, hidden, vocabulary = (
        _number(flags, name) for name in ("num-layers", "hidden-size", "vocab-size")
    )
    if "num-experts" in flags or not layers or not hidden:
        return 0.0
    gated = "swiglu" in flags
    wide = _number(flags, "ffn-hidden-size") or 4 * hidden
    heads = _number(flags, "num-attention-heads") or 1
    groups = (_number(flags, "num-query-groups") or 1) if "group-query-attention" in flags else 0
    attention = 2 * hidden**2 * (1 + (groups / heads if groups else 1))
    tables = 2 if "untie-embeddings-and-output-weights" in flags else 1
    layer = attention + (3 if gated else 2) * hidden * wide
    return layers * layer + tables * vocabulary * hidden


def node_bytes(shard_bytes: int, ranks_per_node: int, slot_count: int, actual: Scheme) -> int:
    """Bytes of a node's arenas, headers included, with stripes of the ``actual`` scheme."""
    geometry = Geometry.for_stripe(
        slot_count=slot_count,
        required_bytes=shard_bytes,
        data_members=actual.data_members,
        parity_members=actual.parity_members,
        block_bytes=BLOCK_BYTES,
    )
    return ranks_per_node * geometry.file_bytes


def shortest_scheme(nodes: Sequence[str], domains: Domains, scheme: Scheme) -> Scheme:
    """The scheme of the shortest stripe over these nodes: it costs the most memory.

    The wanted one if stripes cannot be made at all.
    """
    largest = max(map(len, members_of(nodes, domains).values()), default=1)
    sets = stripe_sets(len(nodes), largest, scheme)
    if not scheme.parity_members or not sets:
        return scheme
    return scheme.shortened(min(len(nodes) // sets, scheme.members))


def _flags(command: Sequence[str]) -> Mapping[str, str]:
    """``--flag value`` and ``--flag=value``, without the dashes; a switch has its next word."""
    found = {}
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else after
    return found


def _number(flags: Mapping[str, str], name: str) -> float:
    try:
        return float(flags.get(name, 0))
    except ValueError:
        return 0.0
