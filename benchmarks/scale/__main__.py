"""Messages and bytes of one snapshot as nodes grow: counted here, and by the model beyond.

    python -m benchmarks.scale [--nodes 2 4 8 16] [--fan-out 32 4 2] [--protect xor:2] [--save FILE]

Counts are of real jobs on virtual nodes of this machine, one rank each, with tiny state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from benchmarks.scale.counted import Count, count_all
from benchmarks.scale.model import (
    Shape,
    control_messages,
    depth,
    encoder_bytes,
    relay_messages,
)
from megatron_ft.coordinator.relays import FAN_OUT

RANKS = (16, 64, 256, 1024, 4096, 16384)
RANKS_PER_NODE = 8
SCHEME, SHARD_BYTES = "rs:6+2", 6 << 30

HEAD = (
    "| | nodes | ranks | fan-out | depth | messages at the coordinator | at the busiest SMP "
    "| bytes at the coordinator | a node | a rank's encoder sends |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--fan-out", type=int, nargs="*", default=[FAN_OUT, 4, 2])
    parser.add_argument("--protect", default="xor:2")
    parser.add_argument("--save", type=Path, help="counts, as JSON")
    options = parser.parse_args()
    counts = [count for fan_out in options.fan_out for count in _count(options, fan_out)]
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(counts)) + b"\n")
    print(HEAD)
    for counted in counts:
        print(_counted(counted))
        print(_modelled("model of it", shape_of(counted, options.protect)))
    for ranks in RANKS:
        shape = Shape(ranks // RANKS_PER_NODE, RANKS_PER_NODE, _scheme(ranks), SHARD_BYTES)
        print(_modelled(f"model, {shape.protect}", shape))


def _count(options: argparse.Namespace, fan_out: int) -> list[Count]:
    """Sizes that need no relay are counted once."""
    sizes = tuple(n for n in options.nodes if fan_out == FAN_OUT or n > fan_out)
    return count_all(sizes, options.protect, fan_out) if sizes else []


def shape_of(found: Count, protect: str) -> Shape:
    """The model of a job that was counted."""
    return Shape(found.nodes, 1, protect, found.shard_bytes, found.block_bytes, found.fan_out)


def _scheme(ranks: int) -> str:
    """What so few nodes allow."""
    return SCHEME if ranks // RANKS_PER_NODE >= 8 else "xor:2"


def _counted(found: Count) -> str:
    shape = shape_of(found, SCHEME)
    return _line("counted", shape, found.messages, found.length, found.encoder_bytes)


def _modelled(name: str, shape: Shape) -> str:
    tally = control_messages(shape)
    return _line(name, shape, tally.messages, tally.length, encoder_bytes(shape))


def _line(name: str, shape: Shape, messages: int, length: int, sent: int) -> str:
    numbers = (
        shape.nodes, shape.ranks, shape.fan_out, depth(shape), messages, relay_messages(shape),
        length, length // shape.nodes, sent,
    )  # fmt: skip
    return f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |"


if __name__ == "__main__":
    main()
