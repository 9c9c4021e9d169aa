"""Whether the Slurm job that we are in survives the loss of a node.

Slurm does not tell: what can be seen is the batch script, and how it was submitted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_ft.launchers.slurm.allocation import ask

SET, IN_SCRIPT, MISSING, UNKNOWN = "set", "in the script", "missing", "unknown"
_FLAG = re.compile(r"(?:^|\s)(?:--no-kill(?:=(?P<value>\S+))?|-k)(?=\s|$)")


def no_kill(environment: Mapping[str, str] = os.environ) -> str | None:
    """SET, IN_SCRIPT, MISSING or UNKNOWN; None outside of a Slurm job.

    IN_SCRIPT where the batch script has it, and the command line, which may overrule the script,
    cannot be seen: 22.05 shows it to nobody.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    script = ask("scontrol", "write", "batch_script", job, "-")
    shown = ask("scontrol", "show", "job", "--oneliner", job) or ""
    submitted = re.search(r"SubmitLine=(.*?)(?:\s\w+=|$)", shown)
    return judge_no_kill(script, submitted.group(1) if submitted else None, environment)


def judge_no_kill(
    script: str | None, submit_line: str | None, environment: Mapping[str, str]
) -> str:
    """As ``no_kill``, from the batch script, the line that submitted it, and variables.  Pure.

    A command line beats variables, which beat the script, as sbatch(1) says.
    """
    given = [
        _in_line(submit_line or ""),
        _in_variables(environment),
        _in_script(script or ""),
    ]
    found = next((value for value in given if value is not None), None)
    if found and submit_line is None:
        return IN_SCRIPT
    if found is not None:
        return SET if found else MISSING
    return UNKNOWN if submit_line is None else MISSING


def warning(found: str | None) -> str:
    """A line for the start of a job that the loss of a node may kill, "" for others.  Pure."""
    if found in (None, SET, IN_SCRIPT):
        return ""
    how = "is not set" if found == MISSING else "is not in the batch script"
    return (
        f"megatron-ft: warning: --no-kill {how}: without it Slurm kills the whole job, and its "
        "memory, when a node is lost; put `#SBATCH --no-kill` into the batch script"
    )


def _in_line(line: str) -> bool | None:
    # What follows the script's name is the script's own.
    matches = list(_FLAG.finditer(line))
    return None if not matches else matches[-1].group("value") != "off"


def _in_variables(environment: Mapping[str, str]) -> bool | None:
    for name in ("SBATCH_NO_KILL", "SALLOC_NO_KILL"):
        if name in environment:
            return environment[name] != "off"
    return None


def _in_script(script: str) -> bool | None:
    lines = re.findall(r"^#SBATCH\s+(.*)$", script, re.MULTILINE)
    return next((v for v in map(_in_line, reversed(lines)) if v is not None), None)
