"""Places of captured tensors that Megatron's checkpoints do not hold as they are.

Those are the ``step`` that torch's optimizers keep for each parameter, and buffers that are not
persistent.  Each gets a place beside a tensor that Megatron does describe: its own global name,
and the leading indices (layer, expert) of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_ft.core.shard import LogicalPlace, Piece, row_major
from megatron_ft.megatron.optimizer import Master
from megatron_ft.trainer import master_tensors

Pieces = Mapping[str, tuple[Piece, ...]]


def step_places(
    masters: Sequence[Master], names: Mapping[int, str], pieces: Pieces
) -> dict[str, LogicalPlace]:
    """Places of tensors without dimensions that the optimizer keeps for each parameter.

    The steps of all layers are one global tensor, for example
    ``optimizer.state.step.decoder.layers.mlp.linear_fc1.weight`` with one element per layer.
    Each data-parallel rank that owns a part of a parameter holds the same step for it.
    Scales have no place: each belongs to the elements that one rank owns.  ``names`` maps ``id``
    of a parameter to its name.
    """
    places: dict[str, LogicalPlace] = {}
    for master in masters:
        own = pieces.get(names[id(master.parameter)], ())
        kept = master_tensors.state_tensors(master.inner, master.tensor)
        for kind, value in kept.items():
            if own and not value.dim() and not kind.endswith(master_tensors.SCALE):
                found = _named(own, f"optimizer.state.{kind}.")
                places[f"{master.name}.{kind}"] = LogicalPlace(0, 1, found)
    return places


def _named(own: Sequence[Piece], prefix: str) -> tuple[Piece, ...]:
    """One piece for each leading index, all of the same element: a parameter may hold experts."""
    made = {_leading(piece): _beside(piece, prefix + piece.global_name, ()) for piece in own}
    return tuple(made.values())


def buffer_places(tensors: Mapping[str, torch.Tensor], pieces: Pieces) -> dict[str, LogicalPlace]:
    """Places of buffers that Megatron does not save, whole on each rank.

    They are constants, or counters that Megatron sets to zero before an iteration ends
    (``reset_model_temporary_tensors``), so ranks that hold a layer hold equal ones.
    """
    places: dict[str, LogicalPlace] = {}
    for name, tensor in tensors.items():
        if name in pieces or isinstance(tensor, torch.nn.Parameter):
            continue
        piece = _by_neighbour(name, tuple(tensor.shape), pieces)
        if piece is not None:
            places[name] = LogicalPlace(0, tensor.numel(), (piece,))
    return places


def _by_neighbour(name: str, shape: tuple[int, ...], pieces: Pieces) -> Piece | None:
    """The place of a tensor by that of another in the smallest module that holds both.

    ``chunk0.decoder.layers.1.mlp.router.counter`` lies beside
    ``chunk0.decoder.layers.1.mlp.router.weight``.
    """
    for scope in _scopes(name):
        beside = [
            (own[0], (f".{own[0].global_name}").removesuffix(other[len(scope) :]))
            for other, own in pieces.items()
            if other.startswith(f"{scope}.")
            and f".{own[0].global_name}".endswith(other[len(scope) :])
        ]
        if beside:
            piece, prefix = min(beside, key=lambda found: len(_leading(found[0])))
            return _beside(piece, (prefix + name[len(scope) :]).removeprefix("."), shape)
    inner = name.partition(".")[2]
    if any(part.isdigit() for part in inner.split(".")):
        return None  # Its layer would be known by a number of this rank's only.
    return Piece(inner, shape, (0,) * len(shape), shape, 0, row_major(shape))


def _scopes(name: str) -> Iterator[str]:
    """The modules that hold ``name``, the smallest first, down to its chunk."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _leading(piece: Piece) -> tuple[int, ...]:
    return piece.global_offset[: len(piece.global_shape) - len(piece.shape)]


def _beside(piece: Piece, name: str, shape: tuple[int, ...]) -> Piece:
    """A whole tensor of ``shape`` at the leading indices of ``piece``."""
    leading = _leading(piece)
    return Piece(
        global_name=name,
        global_shape=(*piece.global_shape[: len(leading)], *shape),
        global_offset=(*leading, *(0 for _ in shape)),
        shape=shape,
        offset=0,
        stride=row_major(shape),
    )
