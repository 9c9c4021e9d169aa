"""Messages and bytes of one snapshot as nodes grow: counted here, and by the model beyond.

    python -m benchmarks.scale [--nodes 2 4 8 16] [--protect xor:2] [--save FILE]

Counts are of real jobs on virtual nodes of this machine, one rank each, with tiny state.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import msgspec

from benchmarks.scale.counted import Count, count_all
from benchmarks.scale.model import Shape, control_messages, encoder_bytes

RANKS = (16, 64, 256, 1024, 4096, 16384)
RANKS_PER_NODE = 8
TIMES = 5
"""So often the model runs; its processor time is the median."""
SCHEME, SHARD_BYTES = "rs:6+2", 6 << 30

HEAD = (
    "| | nodes | ranks | messages at the coordinator | bytes at the coordinator | a node "
    "| a rank's encoder sends | coordinator's processor time |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--protect", default="xor:2")
    parser.add_argument("--save", type=Path, help="counts, as JSON")
    options = parser.parse_args()
    counts = count_all(tuple(options.nodes), options.protect) if options.nodes else []
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(counts)) + b"\n")
    print(HEAD)
    for counted in counts:
        print(_counted(counted))
        print(_modelled("model of it", shape_of(counted, options.protect)))
    for ranks in RANKS:
        shape = Shape(ranks // RANKS_PER_NODE, RANKS_PER_NODE, _scheme(ranks), SHARD_BYTES)
        print(_modelled(f"model, {shape.protect}", shape))


def shape_of(found: Count, protect: str) -> Shape:
    """The model of a job that was counted."""
    return Shape(found.nodes, 1, protect, found.shard_bytes, found.block_bytes)


def _scheme(ranks: int) -> str:
    """What so few nodes allow."""
    return SCHEME if ranks // RANKS_PER_NODE >= 8 else "xor:2"


def _counted(found: Count) -> str:
    shape = shape_of(found, SCHEME)
    return _line("counted", shape, found.messages, found.length, found.encoder_bytes, "")


def _modelled(name: str, shape: Shape) -> str:
    tallies = [control_messages(shape) for _ in range(TIMES)]
    seconds = statistics.median(tally.seconds for tally in tallies)
    messages, length = tallies[0].messages, tallies[0].length
    return _line(name, shape, messages, length, encoder_bytes(shape), f"{seconds:.3f} s")


def _line(name: str, shape: Shape, messages: int, length: int, sent: int, seconds: str) -> str:
    numbers = (shape.nodes, shape.ranks, messages, length, length // shape.nodes, sent)
    return f"| {name} | " + " | ".join(f"{n:,}" for n in numbers) + f" | {seconds} |"


if __name__ == "__main__":
    main()
