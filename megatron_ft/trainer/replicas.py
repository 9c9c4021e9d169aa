"""Digests of live tensors that ranks of a group hold alike, for the job to compare.

They are taken by the copy thread behind the copy, before the optimizer may step: of what was just
captured, and of weights that are not.  A host tensor gets the CRC of its bytes.  On a device its
words are a table of which rows and columns are summed, and the host takes the CRC of these sums:
that finds whatever changes one, two or three words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_ft.arena.digest import digest_block
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.node_messages import REPLICA_DIGEST_BYTES
from megatron_ft.trainer.addresses import DENSE, has_memory
from megatron_ft.trainer.state import ComparesMore, TrainingState

MOST_PARTS = 256
"""Most digests of one group's tensors; of more tensors, neighbours by name share one."""

TIMES_TOLD = 3
"""Reports that give names, too: the first may be of a snapshot that is given up."""
ROW_BYTES = 32768
_WORD_BYTES = 8

Tensors = Mapping[str, torch.Tensor]


class ReplicaGroup(NamedTuple):
    """Tensors that the ranks of a process group have alike: names, and a digest for each part.

    ``labels`` are the parts' names for people, on the group's first rank.
    """

    key: str
    parts: list[list[str]]
    labels: tuple[str, ...]


class ReplicaDigester:
    """Takes the digests of one rank.  What belongs together is found out once."""

    def __init__(self, every: int, exceptions: str) -> None:
        """Of ``every``-th snapshot, 0: of none.  ``exceptions`` are patterns of names that differ
        by design, with commas between."""
        self._every = every
        self._exceptions = [text.strip() for text in exceptions.split(",") if text.strip()]
        self._groups: list[ReplicaGroup] | None = None
        self._told = 0

    def forget(self) -> None:
        """Find out anew what belongs together: the state has other tensors."""
        self._groups, self._told = None, 0

    def due(self, snapshot: SnapshotId) -> bool:
        """True if the replicas of a snapshot are compared, which is the same on all ranks."""
        return self._every > 0 and (snapshot.sequence - 1) % self._every == 0

    def digests(
        self, state: TrainingState, live: Tensors, should_stop: Callable[[], bool]
    ) -> tuple[m.ReplicaDigests, ...]:
        """The digests of all groups; none if it was stopped.

        ``live`` are the tensors of the state.  ValueError if one has no memory now.
        """
        more = state.compared() if isinstance(state, ComparesMore) else {}
        tensors = {**live, **{name: tensor for name, (tensor, _) in more.items()}}
        if self._groups is None:
            groups = {**state.replicas(), **{name: group for name, (_, group) in more.items()}}
            self._groups = list(self._plan(groups, tensors))
        found = []
        for key, parts, labels in self._groups:
            wanted = [tensors[name] for part in parts for name in part]
            digests = digests_of(wanted, should_stop)
            if len(digests) < len(wanted):
                return ()
            left = iter(digests)
            joined = b"".join(_together([next(left) for _ in part]) for part in parts)
            found.append(m.ReplicaDigests(key, joined, labels if self._told < TIMES_TOLD else ()))
        self._told += 1
        return tuple(found)

    def _plan(self, groups: Mapping[str, Any], tensors: Tensors) -> Iterator[ReplicaGroup]:
        """Names by their groups; memory that has several names counts once."""
        by_group, seen = dict[Any, list[str]](), set[tuple[int, int]]()
        for name in sorted(groups.keys() & tensors.keys()):
            tensor, group = tensors[name], groups[name]
            place = tensor.data_ptr(), tensor.nbytes
            left_out = any(fnmatchcase(name, pattern) for pattern in self._exceptions)
            plain = type(tensor) in DENSE and tensor.layout == torch.strided and tensor.nbytes > 0
            if plain and not left_out and place not in seen:
                seen.add(place)
                by_group.setdefault(group, []).append(name)
        for group, names in by_group.items():
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1:
                count = min(len(names), MOST_PARTS)
                cuts = [i * len(names) // count for i in range(count + 1)]
                parts = [names[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
                first = ranks[0] == dist.get_rank()
                labels = tuple(map(_label, parts)) if first else ()
                yield ReplicaGroup(_key(ranks, names), parts, labels)


def groups_of_wrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Process groups of entries: of DistributedDataParallel, and of optimizers of its parameters
    alone."""
    wrapped = {n: v for n, v in state.items() if isinstance(v, DistributedDataParallel)}
    groups: dict[str, Any] = {name: ddp.process_group for name, ddp in wrapped.items()}
    owner = {id(p): groups[name] for name, ddp in wrapped.items() for p in ddp.parameters()}
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            trained = (p for group in value.param_groups for p in group["params"])
            found = {owner.get(id(parameter)) for parameter in trained}
            groups |= {name: found.pop()} if len(found) == 1 else {}
    return groups


def _label(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more" if more else names[0]


def _key(ranks: Sequence[int], names: Sequence[str]) -> str:
    return hashlib.blake2b(repr((ranks, names)).encode(), digest_size=8).hexdigest()


def _together(digests: Sequence[int]) -> bytes:
    """The digest of a part, from those of its tensors."""
    table = np.array(digests, "<u8").view(np.uint8)
    return digest_block(table).to_bytes(REPLICA_DIGEST_BYTES, "little")


def digests_of(
    tensors: Iterable[torch.Tensor], should_stop: Callable[[], bool] = lambda: False
) -> list[int]:
    """The digest of each tensor; of the first ones only, if it was stopped.

    Device work is queued on the current stream.
    """
    made = list[int | torch.Tensor]()
    with torch.no_grad():
        for tensor in tensors:
            if should_stop():
                break
            if not has_memory(tensor):
                raise ValueError("a replica has no memory")
            made.append(folded(tensor) if tensor.is_cuda else _crc(_bytes_of(tensor)))
        folds = [one for one in made if isinstance(one, torch.Tensor)]
        if not folds:
            return [one for one in made if isinstance(one, int)]
        # One copy from the device, as each would wait for it.
        arrived = iter(torch.split(torch.cat(folds).cpu(), [one.numel() for one in folds]))
    return [_crc(next(arrived)) if isinstance(one, torch.Tensor) else one for one in made]


def _crc(data: torch.Tensor) -> int:
    return digest_block(data.numpy())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def folded(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the rows and columns of a tensor's 64-bit words, and what fills no row, as bytes."""
    data = _bytes_of(tensor)
    data = data.clone() if data.storage_offset() % _WORD_BYTES else data
    whole = data.numel() // ROW_BYTES * ROW_BYTES
    table = data[:whole].view(torch.int64).view(-1, ROW_BYTES // _WORD_BYTES)
    sums = [table.sum(0), table.sum(1)] if whole else []
    return torch.cat([*(one.view(torch.uint8) for one in sums), data[whole:]])
