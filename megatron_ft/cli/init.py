"""Write the files that a job starts from: batch scripts, configurations, examples, patches.

  megatron-ft init DIR

The folder serves as MEGATRON_FT_HOME of the batch scripts in DIR/scripts/slurm.  Files that are
there are not replaced.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import megatron_ft
from megatron_ft.core.errors import ConfigError

PARTS = ("scripts/slurm", "scripts/patch-megatron.sh", "configs", "examples", "patches")
SHARED = "share/megatron-ft/"
"""The folder of these files in an installed environment, as pyproject.toml says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")


def main(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder.absolute()
    files = shipped()
    if there := sorted(name for name in files if (folder / name).exists()):
        raise ConfigError(f"{folder / there[0]} is there already: give another folder")
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / name)
    print(
        f"{len(files)} files are in {folder}.  Edit the variables of a batch script, then:\n"
        f"  MEGATRON_FT_HOME={folder} VENV={sys.prefix} \\\n"
        f"      sbatch {folder}/scripts/slurm/pretrain_gpt_inmem.sbatch"
    )
    return 0


def shipped() -> Mapping[str, Path]:
    """The files by their path in a checkout: those of the checkout, else of the installation.

    Raises ConfigError where the installation has none.
    """
    checkout = Path(megatron_ft.__file__).parents[1]
    found = [path for part in PARTS for path in [checkout / part, *(checkout / part).rglob("*.*")]]
    files = {str(path.relative_to(checkout)): path for path in found if path.is_file()}
    if not files:
        installed = [path for path in metadata.files("megatron-ft") or [] if SHARED in str(path)]
        files = {str(path).partition(SHARED)[2]: Path(str(path.locate())) for path in installed}
    files = {name: path for name, path in files.items() if path.suffix != ".pyc"}
    if not files:
        raise ConfigError("this installation has no files to write: install megatron-ft by pip")
    return files
