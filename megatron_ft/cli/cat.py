"""Show a tensor of the unsharded model, from memory or a drained checkpoint.

  megatron-ft cat --job NAME                        the names of all tensors
  megatron-ft cat --job NAME TENSOR                 dtype, shape and values of one
  megatron-ft cat --from DRAINED TENSOR --to FILE   the tensor as a file that torch.load reads

Only the ranges of that tensor are read, and verified.  The job may run meanwhile.  Tensors of a
framework that records no place in the unsharded model go by the name under which they were
captured, as SHARD:NAME where several shards hold one of that name.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.checkpoint.source import SnapshotInfo, open_newest_parts
from megatron_ft.cli import common
from megatron_ft.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megatron_ft.checkpoint.captured import GlobalTensors

EXIT_CODES = {
    2: "no such tensor or snapshot, a part of it is lost, or its bytes are damaged; the message "
    "says which"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tensor", nargs="?", metavar="TENSOR", help="one of them (default: list all)"
    )
    common.add_source(parser)
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to write the tensor to")


def main(arguments: argparse.Namespace) -> int:
    # torch takes a second to import, and wrong arguments are refused before.
    if arguments.to is not None and arguments.tensor is None:
        raise ConfigError("--to needs the name of a tensor; without one all names are listed")
    from megatron_ft.checkpoint.captured import GlobalTensors

    source = common.open_source(arguments)
    with open_newest_parts(source, arguments.iteration) as (info, shards):
        tensors = GlobalTensors(shards)
        if arguments.tensor is None:
            for name, (dtype, shape) in tensors.items():
                common.say(f"{name}  {dtype}{list(shape)}")
            return 0
        tensor = tensors.read(_known(arguments.tensor, tensors))
    if arguments.to is not None:
        _write(tensor, arguments.to)
    common.say(_describe(arguments.tensor, info, tensor, tensors.bytes_read))
    return 0


def _known(name: str, tensors: GlobalTensors) -> str:
    if name in tensors:
        return name
    near = difflib.get_close_matches(name, list(tensors), n=3) or list(tensors)[:3]
    raise ConfigError(
        f"the snapshot has no tensor {name!r}; did you mean {', '.join(near)}? "
        "`megatron-ft cat` without a name lists all"
    )


def _write(tensor: torch.Tensor, path: Path) -> None:
    import torch

    if path.exists():
        raise ConfigError(f"{path} exists already; give another name, or remove it")
    try:
        with path.open("xb") as file:
            torch.save(tensor, file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _describe(name: str, info: SnapshotInfo, tensor: torch.Tensor, bytes_read: int) -> str:
    lines = [f"{name}  {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"]
    lines.append(f"iteration {info.iteration} ({info.level}), {bytes_read} bytes read")
    if tensor.numel() and tensor.is_floating_point():
        values = tensor.double()
        finite = values[values.isfinite()]
        odd = values.numel() - finite.numel()
        if finite.numel():
            lines.append(
                f"min {finite.min():.6g}, mean {finite.mean():.6g}, max {finite.max():.6g}, "
                f"{odd} not finite"
            )
        else:
            lines.append("no finite values")
    lines.append(str(tensor))
    return "\n".join(lines)
