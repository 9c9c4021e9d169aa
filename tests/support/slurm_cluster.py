"""A real Slurm on this machine: munged, slurmctld, and one slurmd per node, in a private folder.

Nothing of it touches a Slurm that the machine may have: key, sockets, ports and configuration
are its own.  All nodes share this machine's /dev/shm and process numbers; a job tells its nodes
apart by SLURMD_NODENAME.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron_ft.core import procfs
from megatron_ft.core.process_tools import free_port

PROGRAMS = (
    "munged",
    "munge",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "unshare",
)
EPILOG = Path(__file__).parents[2] / "scripts" / "slurm" / "epilog.sh"
START_SECONDS = 30.0
NODE_TIMEOUT_SECONDS = 10
"""After this long without word from a slurmd, slurmctld calls its node down."""

_CONFIG = """\
ClusterName=megatronft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{tasks}
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters={select}
SwitchType=switch/none
MpiDefault=none
ReturnToService=1
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdTimeout={timeout}
KillWait=5
MinJobAge=300
Epilog={epilog}
Prolog={prolog}
SchedulerParameters=bf_interval=1,sched_min_interval=500000
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

_CGROUPS = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
"""
NODE_MEMORY_MIB = 4000


def missing_cgroups() -> str:
    """Why steps cannot have control groups here, or nothing."""
    probe = Path("/sys/fs/cgroup/memory/megatron-ft-probe")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"needs control groups of version 1 that may be changed: {error}"
    return ""


def missing() -> str:
    """Why there can be no Slurm here, or nothing."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"no {', '.join(absent)}: install the packages slurm-wlm and munge"
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    allowed = subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False)
    return "" if allowed.returncode == 0 else "nodes cannot have host names (unshare --uts) here"


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class SlurmCluster:
    """Nodes n0, n1, ... of a Slurm that runs until ``stop``."""

    def __init__(self, folder: Path, count: int, cgroups: bool = False) -> None:
        """With ``cgroups`` Slurm tracks steps by control groups, which limit their memory."""
        self.folder, self.cgroups = folder, cgroups
        self.names = [f"n{i}" for i in range(count)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Return when all nodes are idle; RuntimeError, with the logs' ends, if that fails."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.frees_memory(True)
        self.delays_steps(0)
        self._write_config()
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *self._munge_files())
        self._until("munged", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        self._until("idle nodes", lambda: self.states() == {name: "idle" for name in self.names})

    def frees_memory(self, frees: bool) -> None:
        """Whether the site's epilog is ours, which frees the memory of jobs that end, or none."""
        link = self.folder / "epilog"
        link.unlink(missing_ok=True)
        link.symlink_to(EPILOG if frees else "/bin/true")

    def delays_steps(self, seconds: float) -> None:
        """The duration of the site's prolog, for which the first step of a job waits on a node."""
        prolog, made = self.folder / "prolog", self.folder / "prolog.new"
        made.write_text(f"#!/bin/sh\nexec sleep {seconds:g}\n")
        made.chmod(0o755)
        made.rename(prolog)

    def _munge_files(self) -> Iterator[str]:
        for kind in ("key-file", "pid-file", "log-file", "seed-file"):
            yield f"--{kind}={self.folder}/munge.{kind.removesuffix('-file')}"
        yield f"--socket={self.folder}/munge.socket"

    def _write_config(self) -> None:
        controller, *ports = _different_ports(len(self.names) + 1)
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 "
            f"RealMemory={NODE_MEMORY_MIB}"
            for name, port in zip(self.names, ports, strict=True)
        ]
        if self.cgroups:
            (self.folder / "cgroup.conf").write_text(_CGROUPS)
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(
                host=host,
                folder=self.folder,
                ctld_port=controller,
                timeout=NODE_TIMEOUT_SECONDS,
                epilog=self.folder / "epilog",
                prolog=self.folder / "prolog",
                nodes="\n".join(nodes),
                names=",".join(self.names),
                tracking="cgroup" if self.cgroups else "linuxproc",
                tasks="cgroup" if self.cgroups else "none",
                select="CR_Core_Memory" if self.cgroups else "CR_Core",
            )
        )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node that has none."""
        # A host name of its own, by which Open MPI tells nodes apart.
        script = 'hostname "$0" && exec "$@"'
        slurmd = _program("slurmd") or ""
        self._daemon("unshare", "--uts", "sh", "-c", script, name, slurmd, "-D", "-N", name)

    def run(self, *command: str, check: bool = True, more: Mapping[str, str] | None = None) -> str:
        """Standard output of a command of Slurm's, with ``more`` in its environment."""
        environment = {**self.environment, **(more or {})}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """State of each node, in sinfo's short words."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def job_state(self, job: str) -> str:
        """State of a job, as RUNNING or COMPLETED; empty when Slurm has forgotten it."""
        fields = self.run("scontrol", "show", "job", "-o", job, check=False).split()
        return next((f.partition("=")[2] for f in fields if f.startswith("JobState=")), "")

    def processes_of(self, node: str) -> list[int]:
        """Step daemons of a node and all that runs below them; not its slurmd."""
        return [pid for pid in procfs.own_processes() if self._is_of(pid, node)]

    def _is_of(self, pid: int, node: str) -> bool:
        env = procfs.read_environment(pid)
        return (
            env.get("SLURMD_NODENAME") == node
            and env.get("SLURM_CONF") == self.environment["SLURM_CONF"]
        )

    def is_lost(self, node: str) -> bool:
        """Whether the node's slurmd was killed and not started again."""
        return node not in self._daemons

    def kill_node(self, node: str, *, sruns_first: bool = False) -> None:
        """Lose a node: SIGKILL to its slurmd, its step daemons and all processes of its jobs.

        With ``sruns_first`` the first process of each srun dies while the second, which waits for
        that, still lives, as where a node's processes end one after the other.
        """
        slurmd = self._daemons.pop(node)
        host_name = _host_name_of(slurmd.pid)
        slurmd.kill()
        slurmd.wait()
        procfs.kill_matching(lambda pid: self._is_stepd(pid, node), f"step daemons of {node}")
        if sruns_first:
            self._kill_first_of_sruns(host_name)
        # sruns of a supervisor do not say on which node they are, but share its host name.
        procfs.kill_matching(
            lambda pid: self._is_of(pid, node) or _host_name_of(pid) == host_name, f"node {node}"
        )

    def _kill_first_of_sruns(self, host_name: str) -> None:
        """Return when the second processes of the sruns have done what they do then."""
        here = [p for p in procfs.own_processes() if _host_name_of(p) == host_name]
        sruns = {pid for pid in here if _is_srun(pid)}
        second = {pid: os.pidfd_open(pid) for pid in sruns if _parent_of(pid) in sruns}
        assert second, "no srun has a second process: this Slurm needs another test"
        for pid in sruns - second.keys():
            os.kill(pid, signal.SIGKILL)
        alive = [pid for pid, fd in second.items() if not procfs.ended(fd, START_SECONDS)]
        procfs.close_all(second)
        assert not alive, f"second processes of srun {alive} wait for nothing"

    def _is_stepd(self, pid: int, node: str) -> bool:
        # slurmstepd calls itself "slurmstepd: [4.extern]" and keeps the slurmd's log open.
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not command.startswith(b"slurmstepd"):
                return False
            log = str(self.folder / f"slurmd.{node}.log")
            return any(os.readlink(fd.path) == log for fd in os.scandir(f"/proc/{pid}/fd"))
        except OSError:
            return False

    def stop_controller(self) -> None:
        """slurmctld ends, as for an upgrade; nodes and their steps stay."""
        self._daemons["slurmctld"].terminate()
        self._daemons["slurmctld"].wait()

    def start_controller(self) -> None:
        """It runs again, from what it has stored; returns when it answers."""
        if self._daemons["slurmctld"].poll() is not None:
            self._daemon("slurmctld", "-D")
        self._until("slurmctld", lambda: bool(self.states()))

    def stop(self) -> None:
        if (self.folder / "slurm.conf").exists() and "slurmctld" in self._daemons:
            self.run("scancel", "--me", "--signal=KILL", "--full", check=False)
            self.run("scancel", "--me", check=False)
        for name in self.names:
            if name in self._daemons:
                self.kill_node(name)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _daemon(self, program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        label = program if program != "unshare" else arguments[-1]
        with open(self.folder / f"{label}.out", "ab") as out:
            self._daemons[label] = subprocess.Popen(
                [path, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            dead = [n for n, d in self._daemons.items() if d.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = [self.folder / f"{name}.out" for name in dead or self._daemons]
                ends = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in logs)
                raise RuntimeError(f"no {what} within {START_SECONDS:.0f} s; {ends}")
            time.sleep(0.05)


def _host_name_of(pid: int) -> str:
    """Which host name a process shares with others; every node's slurmd has one of its own."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


def _is_srun(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "srun"
    except OSError:
        return False


def _parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def _different_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
