"""The Slurm job that we run in: its nodes, which of them are left, and hosts in place of lost ones.

Everything is asked of Slurm's own commands, with a limit: a controller that does not answer
must not hold up the leases of the nodes, which the same process renews.

Slurm does not give a lost node back to a job, and lets a job grow only where the site allows
that (``permit_job_expansion``).  But a user's steps may run in any of the user's jobs, so a
replacement host is an ordinary job that waits in the queue like any other, only holds a node, and
ends when ours does.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ft.core import procfs
from megatron_ft.core.errors import (
    ConfigError,
    ControlPlaneError,
    MissingEnvironmentError,
    SchedulerAwayError,
)
from megatron_ft.launchers.launcher_env import outside_of_steps

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0
FRESH_SECONDS = 1.0
DEMAND_SECONDS = 300.0
"""Longest time that Slurm is asked again, at the start of a job, while its controller is away."""
SUBMIT_SECONDS = 30.0

# Its node's memory goes with it.  Waiting in the background lets it hear scancel at once.
_HOLD_NODE = """\
trap exit TERM
trap 'rm -rf {folder}/"$SLURMD_NODENAME"' EXIT
while sleep 5 & wait $!; do
    case "$(squeue --noheader --jobs={job} --format=%T 2>&1)" in
        "" | *PENDING* | *COMPLET* | *Invalid*) exit ;;
    esac
done
"""


class Allocation:
    """The nodes of one running job, and replacement hosts that came with jobs of their own."""

    def __init__(
        self,
        job_id: str,
        names: Sequence[str],
        addresses: Mapping[str, str],
        reference: str = "",
    ) -> None:
        """``addresses`` are the nodes' numeric network addresses.

        ``reference`` is how Slurm calls the job where it is a task of an array, whose number
        would stand for all of them.
        """
        self.job_id, self.names = job_id, tuple(names)
        self.reference = reference or job_id
        self._addresses = dict(addresses)
        self._own = self._left = frozenset(names)
        self._hosts: dict[str, str] = {}
        self._asked = float("-inf")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Allocation:
        """The job whose batch script, or interactive shell, started us.

        ConfigError outside of a job, MissingEnvironmentError where Slurm's commands fail,
        SchedulerAwayError where its controller stays away.
        """
        job_id, nodes = (environment.get(f"SLURM_JOB_{n}", "") for n in ("ID", "NODELIST"))
        if not job_id or not nodes:
            raise ConfigError(
                "--launcher slurm works inside a Slurm job only: SLURM_JOB_ID and "
                "SLURM_JOB_NODELIST are not set. Submit a script like scripts/slurm/"
                "pretrain_gpt_inmem.sbatch, or run it in the shell that `salloc` gives"
            )
        if shutil.which("srun") is None:
            raise MissingEnvironmentError("srun is not on PATH: Slurm's commands are needed")
        names = _demand("scontrol", "show", "hostnames", nodes).split()
        found = cls(job_id, names, _find_addresses(nodes), job_reference(environment))
        found.look_for_hosts()
        return found

    @property
    def host_job_name(self) -> str:
        """Name of the jobs by which replacement hosts come."""
        return f"megatron-ft-host-of-{self.job_id}"

    def job_of(self, node: str) -> str:
        return self._hosts.get(node, self.job_id)

    def look_for_hosts(self) -> list[str]:
        """Replacement hosts that came since the last look; from now on they are nodes too."""
        there = self._running_hosts()
        fresh = [node for node in there if node not in self.names]
        if fresh:
            self._addresses |= _find_addresses(",".join(fresh))
            self._hosts |= {node: there[node] for node in fresh}
            self.names += tuple(fresh)
            self._asked = float("-inf")
        return fresh

    def _running_hosts(self) -> dict[str, str]:
        answer = ask(
            "squeue", "--noheader", "--me", "--states=RUNNING", f"--name={self.host_job_name}",
            "--format=%N %i",
        )  # fmt: skip
        # None, for a controller that does not answer, must not look like lost nodes.
        there = self._hosts.items() if answer is None else map(str.split, answer.splitlines())
        return {node: job for node, job in there}

    def address(self, node: str) -> str:
        """The numeric address by which other nodes reach this one."""
        return self._addresses[node]

    def left(self, *, fresh: bool = False) -> frozenset[str]:
        """Nodes that Slurm has not taken out of the job as failed; at most a second old.

        Slurm takes a node out after SlurmdTimeout without a message from it, and never gives it
        back.  While the controller does not answer, what it said last.
        """
        if fresh or time.monotonic() - self._asked > FRESH_SECONDS:
            nodes = ask("squeue", "--noheader", "--jobs", self.reference, "--format=%N")
            names = "" if nodes is None else ask("scontrol", "show", "hostnames", nodes.strip())
            self._own = frozenset(names.split()) if names else self._own
            hosts = self._running_hosts() if self._hosts else {}
            self._left = self._own | frozenset(self._hosts.keys() & hosts.keys())
            self._asked = time.monotonic()
        return self._left

    def draining(self) -> dict[str, str] | None:
        """The reason by node for nodes that get no new jobs; None without an answer."""
        described = ask("scontrol", "show", "node", "--oneliner", ",".join(self.names))
        return None if described is None else draining_nodes(described)

    def seconds_left(self) -> float:
        """Seconds until Slurm ends the job; 0 if it has no time limit, or none is known."""
        answer = ask("squeue", "--noheader", "--jobs", self.reference, "--format=%L")
        return parse_duration((answer or "").strip())


def job_reference(environment: Mapping[str, str]) -> str:
    """The name of this one job for Slurm's commands: its number, or ARRAY_TASK.  Pure.

    One task of an array has the array's own number, which would stand for all tasks.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{n}_ID", "") for n in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def node_addresses(described: str) -> dict[str, str]:
    """NodeAddr by NodeName from ``scontrol show node --oneliner``.  Pure."""
    return dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", described))


_DRAINING = re.compile(
    r"NodeName=(?P<name>\S+).*? State=(?P<state>\S+)(?:.*? Reason=(?P<reason>.*?)(?= \w+=|$))?"
)


def draining_nodes(described: str) -> dict[str, str]:
    """Reason by node, "" if none was given, for those that drain or were said to fail soon.  Pure.

    ``described`` is the output of ``scontrol show node --oneliner``.
    """
    found = (_DRAINING.search(line) for line in described.splitlines())
    return {
        node["name"]: (node["reason"] or "").strip()
        for node in found
        if node and {"DRAIN", "FAIL"} & set(node["state"].split("+"))
    }


def numeric(address: str) -> str:
    """The numeric form of a host name; the name itself where it cannot be resolved."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def parse_duration(text: str) -> float:
    """Seconds of Slurm's ``[days-][[hours:]minutes:]seconds``; 0 for a word.  Pure."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in (*parts, *([days] if dash else []))):
        return 0.0
    seconds = sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))
    return float(seconds + int(days or 0) * 86400)


def _find_addresses(nodes: str) -> dict[str, str]:
    described = _demand("scontrol", "show", "node", "--oneliner", nodes)
    return {name: numeric(at) for name, at in node_addresses(described).items()}


_OF_SLURM = r"(?:srun|slurmstepd|slurm_\w+|scontrol|squeue|sbatch):? (?:fatal: )?(?:error: )?"
_AWAY = re.compile(
    _OF_SLURM + r".*(?:contact slurm|timed out|refused|connect failure|Zero Bytes|ommunication"
    r"|Transport endpoint|temporarily|confirm allocation|Prolog|create step|Task launch)"
)


def is_away(text: str) -> bool:
    """True if a message is of Slurm, and says that it could not do just now what it should.  Pure.

    Its controller is away or busy, or the Prolog of a node takes long.
    """
    return _AWAY.search(text) is not None


def is_over(text: str) -> bool:
    """True if a message of Slurm says that the job has ended: no process can be started.  Pure."""
    return re.search(_OF_SLURM + r".*(?:has expired|Invalid job id)", text) is not None


class _Answer(NamedTuple):
    """The output of a command of Slurm's, None if it failed; ``problem`` says how."""

    text: str | None
    problem: str = ""


def _asked(command: Sequence[str]) -> _Answer:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=ASK_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _Answer(None, f"{command[0]}: error: timed out after {ASK_SECONDS:g} s")
    except OSError as error:
        return _Answer(None, str(error.strerror))
    if done.returncode:
        return _Answer(None, done.stderr.strip() or f"it exited with {done.returncode}")
    return _Answer(done.stdout)


def ask(*command: str) -> str | None:
    """The output of a command of Slurm's; None when it fails or does not answer in time."""
    return _asked(command).text


def _demand(*command: str) -> str:
    """The same, asked again with growing pauses while Slurm's controller is away."""
    pause, deadline, told = 1.0, time.monotonic() + DEMAND_SECONDS, False
    while (answer := _asked(command)).text is None:
        where = f"`{' '.join(command)}` failed: {answer.problem}"
        if not is_away(answer.problem):
            raise MissingEnvironmentError(f"{where}; is this shell inside a Slurm job?")
        if time.monotonic() + pause > deadline:
            raise SchedulerAwayError(f"{where}, for {DEMAND_SECONDS:g} s; run the command again")
        if not told:
            log.warning("%s; asked again for up to %.0f s", where, DEMAND_SECONDS)
        told = True
        time.sleep(pause)
        pause = min(2 * pause, 15.0)
    return answer.text


class ReplacementHosts:
    """More nodes for a job in ``allocation`` whose arenas are in ``job_dir`` on each node.

    ``seconds`` is the longest wait for them.  ``flags`` are the site's own for sbatch, as
    ``--gpus-per-node=8``.
    """

    def __init__(
        self, allocation: Allocation, job_dir: Path, flags: Sequence[str], seconds: float
    ) -> None:
        self.seconds, self.seconds_left = seconds, allocation.seconds_left
        self._allocation, self._folder, self._flags = allocation, job_dir, tuple(flags)

    def request(self, count: int) -> str:
        """Submit a job for each host; what was asked for.  ControlPlaneError if sbatch fails."""
        jobs = [self._submit() for _ in range(count)]
        return f"a host from Slurm job {', '.join(jobs)}"

    def arrived(self) -> list[str]:
        """Hosts that came since this was asked before; the launcher has them from now on."""
        return self._allocation.look_for_hosts()

    def withdraw(self) -> None:
        """Cancel the jobs that still wait."""
        ask("scancel", "--me", "--state=PENDING", f"--name={self._allocation.host_job_name}")

    def end(self) -> None:
        """Cancel all of them: our job is done."""
        ask("scancel", "--me", f"--name={self._allocation.host_job_name}")

    def _submit(self) -> str:
        seconds = self._allocation.seconds_left()
        command = host_command(self._allocation, self._folder, seconds, self._flags, os.environ)
        try:
            done = subprocess.run(
                command, env=outside_of_steps(os.environ), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ControlPlaneError(f"sbatch failed: {error}") from error
        if done.returncode:
            raise ControlPlaneError(f"sbatch says: {done.stderr.strip()}")
        return done.stdout.strip().partition(";")[0]


def host_command(
    allocation: Allocation,
    job_dir: Path,
    seconds: float,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> list[str]:
    """sbatch for one more host of ``allocation``, for the ``seconds`` it has left.  Pure.

    Partition, account, QOS and reservation are the job's, as ``environment`` has them, unless
    ``flags`` say otherwise.
    """
    same = {
        flag: value
        for flag in ("partition", "account", "qos", "reservation")
        if (value := environment.get(f"SLURM_JOB_{flag.upper()}"))
    }
    limit = [f"--time={max(1, int(seconds // 60))}"] if seconds else []
    script = _HOLD_NODE.format(folder=shlex.quote(str(job_dir)), job=allocation.reference)
    return [
        "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue",
        f"--job-name={allocation.host_job_name}", "--output=/dev/null", "--chdir=/",
        f"--exclude={','.join(allocation.names)}", *limit,
        *(f"--{flag}={value}" for flag, value in same.items()), *flags, f"--wrap={script}",
    ]  # fmt: skip


NO_KILL_ADVICE = "put `#SBATCH --no-kill` into the batch script"
_NO_KILL = re.compile(r"(?:^|\s)(?:--no-kill(?:=(?P<value>\S+))?|-k)(?=\s|$)")


def no_kill(environment: Mapping[str, str] = os.environ) -> bool | None:
    """True if the Slurm job that we are in shall outlive the loss of a node.

    None outside of one, and while Slurm does not answer.  It does not tell by itself: the batch
    script is read, and how it was submitted, where that is shown; salloc is a process above.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    script = ask("scontrol", "write", "batch_script", job, "-")
    shown = ask("scontrol", "show", "job", "--oneliner", job)
    if shown is None:
        return None
    submitted = re.search(r"SubmitLine=(.*?)(?:\s\w+=|$)", shown)
    line = submitted.group(1) if submitted else shlex.join(procfs.command_above("salloc"))
    return asks_no_kill(script or "", line, environment)


def asks_no_kill(script: str, submit_line: str, environment: Mapping[str, str]) -> bool:
    """True if a batch script, variables or a command line ask for --no-kill.  Pure.

    A command line beats variables, which beat the script, as sbatch(1) says.
    """
    variables = (environment.get(name) for name in ("SBATCH_NO_KILL", "SALLOC_NO_KILL"))
    places = [
        *re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE),
        *(f"--no-kill={value or 'set'}" for value in variables if value is not None),
        submit_line,
    ]
    given = [flag.group("value") for place in places for flag in _NO_KILL.finditer(place)]
    return bool(given) and given[-1] != "off"


GRACE_ADVICE = (
    "ask the site for SlurmctldParameters=preempt_send_user_signal: the batch script is then told "
    "alone, and drains (docs/how-to/slurm.md)"
)


def grace_lost(environment: Mapping[str, str] = os.environ) -> bool:
    """True if preemption ends the steps of our Slurm job as its grace time begins."""
    partition = environment.get("SLURM_JOB_PARTITION")
    if not partition or not environment.get("SLURM_JOB_ID"):
        return False
    config = ask("scontrol", "show", "config") or ""
    return loses_grace(config, ask("scontrol", "show", "partition", "--oneliner", partition) or "")


def loses_grace(config: str, partition: str) -> bool:
    """The same from what scontrol shows of the configuration and of the partition.  Pure."""
    mode = re.search(r"^PreemptMode\s*=\s*(\S+)", config, re.MULTILINE)
    grace = re.search(r"\bGraceTime=(\d+)", partition)
    off = mode is None or mode.group(1) == "OFF" or "PreemptMode=OFF" in partition.split()
    return not off and bool(grace and int(grace[1])) and "preempt_send_user_signal" not in config
