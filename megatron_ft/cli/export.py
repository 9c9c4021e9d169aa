"""Turn a snapshot into a checkpoint that the training framework loads itself.

  megatron-ft export --job NAME --to DIR
  megatron-ft export --from DRAINED --to DIR --iteration 2000

Reads the memory of a job that runs or has stopped, or a drained checkpoint.  While the memory of a
running job is read, snapshots that need it are skipped.  Writes a checkpoint as the framework that
trained saves it: Megatron-LM's distributed checkpoint (torch_dist), which unmodified Megatron loads
with `--load DIR`, or DeepSpeed's files, which unmodified `engine.load_checkpoint(DIR)` and
DeepSpeed's converters read.  It needs no trainer and no GPU, but the release of the framework that
trained.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.checkpoint.export import FORMATS, export
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli import common
from megatron_ft.core.errors import ConfigError

EXIT_CODES: Mapping[int, str] = {
    2: "nothing was written: no such snapshot, not enough recorded with it, or another release of "
    "the framework; the message says what"
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_source(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--format", choices=FORMATS, help="of the files (that of the framework that trained)"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="Python module to import first, for classes of your own that it registers "
        "(megatron_ft.register_class); may be repeated",
    )


def main(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    for module in arguments.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--import {module} cannot be imported: {error}; is it on PYTHONPATH?"
            ) from error
    with open_newest(common.open_source(arguments), arguments.iteration) as shards:
        iteration, count = shards.info.iteration, len(shards)
        folder, advice = export(shards, arguments.to.absolute(), arguments.format)
    seconds = time.monotonic() - started
    print(f"iteration {iteration}: {count} shards in {seconds:.1f} s: {folder}")
    print(f"continue with: {advice}")
    return 0
