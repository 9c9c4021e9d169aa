"""What the batch scripts do after each exit code, and on signals: requeue, continue, or end.

Slurm's commands only write down here that they were called; the real ones: test_slurm_ends.py.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.core.environment import check_names
from tests.support.jobs import ROOT

SUPERVISE = ROOT / "scripts" / "slurm" / "supervise.sh"
CALLED = """\
#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
case "${0##*/} $*" in
    "squeue --steps "*) [ -z "$STEPS" ] || echo "$STEPS" ;;
    "sleep infinity") ;;
    "sleep "*) exec /bin/sleep 0.1 ;;
    *deputy.sh*) echo watching ;;
    *--format=%T) echo "$STATE" ;;
    *--format=%L) echo "$LEFT" ;;
    *"show job"*) echo "$SHOWN" ;;
    "squeue "* | *hostnames*) printf '%s\\n' $NODES ;;
    *requeue*) exit "$REQUEUE" ;;
esac
"""
RUN = """\
#!/bin/bash
trap 'echo told >>"$CALLS"; told=1' TERM
echo "begun $*" >>"$CALLS"
[ -n "$SIGNALS" ] || exit "$CODE"
while [ "$(grep -c ^sent "$CALLS")" -lt "$SIGNALS" ]; do /bin/sleep 0.05; done
exit "$CODE"
"""


FREED = "--output=none bash -c for folder in"


class Batch:
    """The batch script's part in a folder of commands that only write down their calls."""

    def __init__(self, folder: Path, code: int, **variables: str) -> None:
        self.calls = folder / "calls"
        self.calls.touch()
        for name in ("squeue", "scontrol", "scancel", "srun", "sleep"):
            self._write(folder / name, CALLED)
        self._write(folder / "megatron-ft", RUN)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "CODE": str(code),
            "SIGNALS": "",
            "REQUEUE": "1",
            "STATE": "RUNNING",
            "NODES": "n0",
            "STEPS": "",
            "LEFT": "1-02:00:00",
            "SLURM_JOB_ID": "9",
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_NODELIST": "n0",
            "SLURMD_NODENAME": "n0",
            "STATE_DIR": str(folder / "state"),
            **variables,
        }

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o700)

    def start(self, before: str = "") -> subprocess.Popen[str]:
        command = ["bash", "-c", f"source {SUPERVISE}; {before} supervise true"]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def end(self) -> int:
        return self.start().wait(60)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.calls.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def did(self, words: str) -> bool:
        return words in self.calls.read_text()

    def note_sent(self) -> None:
        """The program that it starts has had a signal more; see RUN."""
        with self.calls.open("a") as calls:
            calls.write("sent\n")

    def deputies(self) -> set[str]:
        """Nodes on which deputies were started."""
        lines = [line for line in self.calls.read_text().splitlines() if "deputy.sh" in line]
        return {line.partition("--nodelist=")[2].split()[0] for line in lines}

    def until(self, words: str, process: subprocess.Popen[str]) -> None:
        """Wait for a call."""
        await_that(words, lambda: self.did(words) or process.poll() is not None)
        assert self.did(words), f"it ended before {words!r}"


def await_that(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within 60 s"
        time.sleep(0.05)  # nobody tells of lines in a file


@pytest.mark.parametrize("name", ["AFTER_TERM", "ON_NO_SPARE", "MAX_REQUEUES"])
def test_a_policy_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    batch = Batch(tmp_path, 0, **{name: "grow"})
    assert batch.end() == 2
    assert not batch.did("begun")


def test_an_environment_without_the_program_is_refused(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 0, VENV="/nowhere")
    (tmp_path / "megatron-ft").unlink()
    batch.environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    process = batch.run("bash", "-c", f"source {SUPERVISE}; supervise true")
    assert process.returncode == 2 and not batch.calls.read_text()
    assert "no command megatron-ft in '/nowhere/bin'" in process.stderr, process.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("MEGATRON_FT_HOME", "export MEGATRON_FT_HOME"), ("TRAIN", "flags.txt")]
)
def test_a_script_without_its_files_trains_nothing(tmp_path: Path, name: str, said: str) -> None:
    given = {"MEGATRON_FT_HOME": str(ROOT), "TRAIN": "true", "SLURM_SUBMIT_DIR": str(tmp_path)}
    batch = Batch(tmp_path, 0, **{key: value for key, value in given.items() if key != name})
    done = batch.run("bash", SUPERVISE.with_name("pretrain_gpt_inmem.sbatch"))
    assert done.returncode == 2 and said in done.stderr, done
    assert not batch.did("begun")


def test_a_script_that_only_checks_asks_the_doctor_and_ends(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 1, CHECK_ONLY="yes")
    assert batch.end() == 1
    (begun,) = batch.calls.read_text().splitlines()
    assert begun.startswith("begun doctor --launcher slurm --job job") and begun.endswith("true")


def test_nothing_follows_a_requeue(tmp_path: Path) -> None:
    """Slurm may end what the script waits for before it ends the script."""
    batch = Batch(tmp_path, 13, REQUEUE="0")
    batch.end()
    # Deputies that the script has begun beside itself may still look for their nodes.
    looks = ("scontrol show hostnames", "squeue")
    calls = [c for c in batch.calls.read_text().splitlines() if not c.startswith(looks)]
    assert calls[-2:] == ["scontrol requeue 9", "sleep infinity"], calls


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_script_that_slurm_ends_for_its_requeue_ends_at_once(tmp_path: Path, name: str) -> None:
    """Not after KillWait: the nodes are waited for.  Slurm does not wait for its command's end."""
    batch = Batch(tmp_path, 13, REQUEUE="0")
    batch._write(tmp_path / "scontrol", CALLED.replace("exit", f"kill -{name} $PPID; exit"))
    assert batch.end() == -signal.Signals[f"SIG{name}"]
    assert batch.did("scontrol requeue 9") and not batch.did("sleep infinity")


def test_a_job_that_was_cancelled_is_not_revived(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 13, STATE="COMPLETING")
    assert batch.end() == 13
    assert not batch.did("scontrol requeue")


def test_deputies_are_on_two_other_nodes_whatever_their_names_begin_with(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 0, NODES="n1 n10 n11 n12", SLURMD_NODENAME="n1", SIGNALS="1")
    script = batch.start()
    batch.until("--nodelist=n11 ", script)
    batch.note_sent()
    # They are started beside the script, and have its output open as long as they run.
    script.communicate(timeout=60)
    assert script.returncode == 0
    assert batch.deputies() == {"n10", "n11"}
    assert batch.calls.read_text().count(f"deputy.sh n1 {tmp_path}/state") == 2


@pytest.mark.parametrize(
    ("running", "nodes", "started"),
    [
        ("n10 n11", "n1 n10 n11 n12", set()),
        ("n10 n11", "n1 n11 n12", {"n12"}),
        ("n10 n11", "n1 n12 n13 n14", {"n12", "n13"}),
        ("n10", "n1 n10", set()),
    ],
    ids=["both", "one lost", "both lost", "no other node"],
)
def test_a_lost_deputy_gets_a_successor(
    tmp_path: Path, running: str, nodes: str, started: set[str]
) -> None:
    """A step on a node that is in the job no more counts as lost."""
    steps = "\n".join(f"{node} megatron-ft-deputy" for node in running.split())
    batch = Batch(tmp_path, 0, NODES=nodes, STEPS=steps, SLURMD_NODENAME="n1", SIGNALS="1")
    script = batch.start()
    for node in sorted(started):
        batch.until(f"--nodelist={node} ", script)
    batch.until("sleep 10", script)
    batch.note_sent()
    script.communicate(timeout=60)
    assert batch.deputies() == started


def test_flags_for_srun_stay_one_word(tmp_path: Path) -> None:
    """As a container's image and mounts, of which a shell would make flags of ours."""
    flags = "--container-image=x.sqsh --container-mounts=/dev/shm:/dev/shm"
    batch = Batch(tmp_path, 0, SRUN_FLAGS=flags, RUN_FLAGS="--lease-seconds 4")
    batch._write(tmp_path / "megatron-ft", '#!/bin/sh\nprintf "<%s>" "$@" >>"$CALLS"\n')
    assert batch.end() == 0
    assert batch.did(f"<--srun-flags={flags}><--lease-seconds><4><--><true>")
    other = tmp_path / "without"  # programs of the first may still be running
    other.mkdir()
    without = Batch(other, 0)
    without.calls.write_text("")
    assert without.end() == 0 and not without.did("--srun-flags")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "240"),
        ({"DRAIN_STOP_SECONDS": "900"}, "900"),
        ({"MEGATRON_FT_DRAIN_STOP_SECONDS": "800"}, "800"),
    ],
)
def test_a_last_drain_may_take_what_the_warning_leaves(
    tmp_path: Path, given: dict[str, str], told: str
) -> None:
    """Not the 25 seconds of a launcher that kills after 30."""
    batch = Batch(tmp_path, 0, **given)
    show = '#!/bin/sh\necho "may drain for $MEGATRON_FT_DRAIN_STOP_SECONDS s" >>"$CALLS"\n'
    batch._write(tmp_path / "megatron-ft", show)
    assert batch.end() == 0
    assert batch.did(f"may drain for {told} s")


ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, "120"),
        ({"MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}, "0"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": "3", "MAX_REQUEUES": "0"}, "120"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": "2"}, "0"),
    ],
)
def test_a_job_that_nothing_starts_again_does_not_count_on_a_requeue(
    tmp_path: Path, settings: dict[str, str], seconds: str
) -> None:
    batch = Batch(tmp_path, 0, ON_NO_SPARE="auto", **settings)
    assert batch.end() == 0
    assert batch.did(f"--on-no-spare auto --queue-seconds {seconds} ")


@pytest.mark.parametrize(("seconds", "warned"), [("240", False), ("300", True)])
def test_a_drain_that_may_take_longer_than_slurms_warning_leaves_is_told(
    tmp_path: Path, seconds: str, warned: bool
) -> None:
    given = {"MEGATRON_FT_HOME": str(ROOT), "VENV": "/", "DRAIN_STOP_SECONDS": seconds}
    batch = Batch(tmp_path, 0, **given)
    done = batch.run("bash", SUPERVISE.with_name("deepspeed_inmem.sbatch"))
    assert done.returncode == 0, done
    assert ("leaves only 300 s" in done.stderr) == warned, done.stderr


@pytest.mark.parametrize(
    ("code", "settings", "requeued"),
    [
        (0, {}, False),
        (10, {}, False),
        (11, {}, True),
        (11, {"ON_NO_SPARE": "hold"}, True),
        (11, {"ON_NO_SPARE": "shrink"}, True),
        (11, {"ON_NO_SPARE": "auto"}, True),
        (11, {"ON_NO_SPARE": "stop"}, False),
        (12, {}, False),
        (13, {}, True),
        (13, {"AFTER_TERM": "stop"}, False),
        (13, {"MAX_REQUEUES": "3", "SLURM_RESTART_COUNT": "3"}, False),
        (14, {}, True),
    ],
)
def test_what_follows_from_an_exit_code(
    tmp_path: Path, code: int, settings: dict[str, str], requeued: bool
) -> None:
    batch = Batch(tmp_path, code, **settings)
    assert batch.end() == code
    assert batch.did("scontrol requeue 9") == requeued
    assert batch.did(FREED) == (code != 0), "memory of a job that ends is freed"
    policy = settings.get("ON_NO_SPARE", "")
    assert batch.did(f"--on-no-spare {policy if policy in ('hold', 'shrink', 'auto') else 'stop'} ")
    assert batch.did("scancel --me --name=megatron-ft-host-of-9")
    assert not batch.did("--state=PENDING")


@pytest.mark.parametrize(
    ("code", "settings", "goes_on"),
    [(0, {}, False), (10, {}, False), (13, {}, True), (14, {}, True), (11, {}, True)]
    + [(13, {"AFTER_TERM": "stop"}, False)],
)
def test_what_follows_from_a_task_of_an_array(
    tmp_path: Path, code: int, settings: dict[str, str], goes_on: bool
) -> None:
    batch = Batch(tmp_path, code, **ARRAY, **settings)
    assert batch.end() == code
    assert batch.did("scancel --state=PENDING 7") != goes_on
    assert batch.did("--job job-7 ")
    assert batch.did("squeue --noheader --jobs 7_2 ") or code in (0, 14)
    assert not batch.did("squeue --noheader --jobs 9 "), "it may stand for all tasks"
    assert batch.did(FREED) == (code not in (0, 14)), "what is not on disk stays"
    assert not batch.did("requeue")


@pytest.mark.parametrize("array", [{}, ARRAY])
def test_a_second_script_of_one_job_leaves_all_to_the_first(
    tmp_path: Path, array: dict[str, str]
) -> None:
    """As when a job was submitted twice, and shares nodes with itself."""
    batch = Batch(tmp_path, 2, JOB="twice", **array)
    lock = tmp_path / "state" / "twice" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert batch.end() == 2
    assert batch.did("begun") and not batch.did("srun") and not batch.did("scancel")
    assert batch.end() == 2
    assert batch.did(FREED), "nobody holds it any more"


def test_only_what_this_slurm_job_has_made_is_freed(tmp_path: Path) -> None:
    job = tmp_path / "arenas" / "a job"
    for node, number in (("n0", "9"), ("n1", "8"), (".worlds", "9")):
        (job / node).mkdir(parents=True)
        (job / node / "slurm-job").write_text(number)
    free = f'source {SUPERVISE}; bash -c "$FREE" "$ARENA_DIR/$JOB" "$SLURM_JOB_ID"'
    batch = Batch(tmp_path, 0, ARENA_DIR=str(job.parent), JOB=job.name)
    assert batch.run("bash", "-c", free).returncode == 0
    assert [node.name for node in job.iterdir()] == ["n1"]
    batch.environment["SLURM_JOB_ID"] = "8"
    assert batch.run("bash", "-c", free).returncode == 0
    assert not job.exists() and job.parent.exists()


@pytest.mark.parametrize("code", [1, 129, 134, 135, 137, 139])
def test_a_supervisor_that_crashed_is_started_again(tmp_path: Path, code: int) -> None:
    """By an error of its own or whatever signal, its nodes' memory is as it was."""
    batch = Batch(tmp_path, code)
    assert batch.end() == code
    assert batch.calls.read_text().count("begun") == 3


@pytest.mark.parametrize("code", [0, 2, 10, 12, 13, 130])
def test_a_supervisor_that_ended_is_not_started_again(tmp_path: Path, code: int) -> None:
    batch = Batch(tmp_path, code)
    assert batch.end() == code
    assert batch.calls.read_text().count("begun") == 1


def test_a_supervisor_told_to_stop_while_it_starts_is_one_that_did_not_drain(
    tmp_path: Path,
) -> None:
    batch = Batch(tmp_path, 143)
    assert batch.end() == 14
    assert batch.calls.read_text().count("begun") == 1 and batch.did("scontrol requeue 9")


def test_a_script_told_to_stop_before_its_supervisor_starts_none(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 0)
    assert batch.start("kill -TERM $$;").wait(60) == 14
    assert not batch.did("begun") and batch.did("scontrol requeue 9")


@pytest.mark.parametrize(
    ("left", "requeued"), [("4:59", False), ("0:30", False), ("1:00:00", True), ("", True)]
)
def test_a_time_limit_within_its_own_warning_requeues_nothing(
    tmp_path: Path, left: str, requeued: bool
) -> None:
    """Slurm gives that warning at once: a hundred incarnations would train nothing."""
    batch = Batch(tmp_path, 0, LEFT=left)
    assert batch.start("kill -TERM $$;").wait(60) == 14
    assert batch.did("scontrol requeue 9") == requeued
    drained = Batch(tmp_path, 13, LEFT=left)
    drained.calls.write_text("")
    assert drained.end() == 13
    assert drained.did("scontrol requeue 9"), "it trained"


@pytest.mark.parametrize(("name", "requeued"), [("TERM", True), ("USR1", False)])
def test_signals_reach_the_supervisor_once(tmp_path: Path, name: str, requeued: bool) -> None:
    batch = Batch(tmp_path, 13, SIGNALS="3")
    process = batch.start()
    batch.until("begun", process)
    for _ in range(3):
        process.send_signal(signal.Signals[f"SIG{name}"])
        batch.until("told", process)
        batch.note_sent()
    assert process.wait(60) == 13
    assert batch.calls.read_text().count("told") == 1
    assert batch.did("scontrol requeue") == requeued


def test_what_keeps_the_deputies_ends_with_a_script_that_is_killed(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 0, SIGNALS="1")
    script = batch.start()
    batch.until("sleep 10", script)
    script.kill()
    script.wait(20)
    batch.note_sent()
    # It has the script's output open as long as it runs.
    script.communicate(timeout=20)


SHOWN = (
    "JobId=9 JobName=job JobState=COMPLETING Reason={} Dependency=(null) Requeue={} Restarts={} "
    "BatchFlag=1 Reboot=0 ExitCode={} RunTime=00:00:07"
)
FAILED = "JobLaunchFailure"


@pytest.mark.parametrize(
    ("shown", "settings", "requeued"),
    [
        ((FAILED, 1, 0, "0:9"), {}, True),
        ((FAILED, 1, 3, "0:9"), {"SLURM_RESTART_COUNT": "3"}, True),
        (("RaisedSignal:9(Killed)", 1, 0, "0:9"), {}, True),
        (("None", 1, 0, "0:9"), {}, False),
        (("TimeLimit", 1, 0, "0:9"), {}, False),
        (("NonZeroExitCode", 1, 0, "137:0"), {}, False),
        ((FAILED, 1, 0, "0:15"), {}, False),
        ((FAILED, 0, 0, "0:9"), {}, False),
        ((FAILED, 1, 1, "0:9"), {}, False),
        ((FAILED, 1, 3, "0:9"), {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}, False),
        ((FAILED, 1, 0, "0:9"), ARRAY, False),
    ],
)
def test_a_deputy_requeues_a_job_that_was_killed_and_no_other(
    tmp_path: Path, shown: tuple[object, ...], settings: dict[str, str], requeued: bool
) -> None:
    batch = Batch(tmp_path, 0, SHOWN=SHOWN.format(*shown), **{"MAX_REQUEUES": "9", **settings})
    batch.environment["REQUEUE"] = "0"
    end_deputy(batch)
    assert batch.did("scontrol requeue") == requeued


def test_a_deputy_asks_until_slurm_answers_and_accepts(tmp_path: Path) -> None:
    shown = SHOWN.format(FAILED, 1, 0, "0:9")
    batch = Batch(tmp_path, 0, SHOWN=shown, MAX_REQUEUES="9", REQUEUE="0")
    third = '[ "$(grep -ce "$1" "$CALLS")" -ge 3 ] || exit 1\ncase'
    batch._write(tmp_path / "scontrol", CALLED.replace("case", third))
    end_deputy(batch)
    assert batch.calls.read_text().count("scontrol --oneliner") == 5
    assert batch.calls.read_text().count("scontrol requeue") == 3


def end_deputy(batch: Batch) -> None:
    """Start a deputy of n0, send it SIGTERM, as Slurm does to each step, and await its end."""
    command = ["bash", SUPERVISE.with_name("deputy.sh"), "n0", batch.calls.with_name("log")]
    with subprocess.Popen(command, env=batch.environment, stdout=subprocess.PIPE) as deputy:
        assert deputy.stdout is not None and deputy.stdout.readline() == b"watching\n"
        deputy.terminate()
        try:
            deputy.wait(60)
        finally:
            deputy.kill()


def failing(batch: Batch, command: str, times: int, said: str) -> None:
    """Have a command of Slurm's fail at first, so many times, with this on its standard error."""
    counter = f'echo x >>"$CALLS.{command}"\n'
    counter += f'[ "$(wc -l <"$CALLS.{command}")" -gt {times} ] || '
    counter += f'{{ echo "{said}" >&2; exit 1; }}\ncase'
    asked = {"squeue": "*%T", "scontrol": "requeue*"}[command]  # others ask in the background
    own = CALLED.replace("case", f'if [[ "$*" = {asked} ]]; then\n{counter[:-4]}fi\ncase', 1)
    batch._write(batch.calls.with_name(command), own)


AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_a_requeue_waits_for_a_scheduler_that_is_away(tmp_path: Path, command: str) -> None:
    batch = Batch(tmp_path, 13, REQUEUE="0")
    failing(batch, command, 3, AWAY)
    process = batch.start()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out  # it became `sleep infinity`
    assert batch.did("scontrol requeue 9") and batch.did("sleep infinity"), out


def test_what_slurm_refuses_is_not_asked_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 13, REQUEUE="0")
    failing(batch, "scontrol", 1, "Requested operation is presently disabled for job 9")
    assert batch.end() == 13
    assert batch.calls.read_text().count("scontrol requeue") == 1


def test_a_scheduler_that_stays_away_is_asked_for_its_time(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 13, REQUEUE="0", ASK_SECONDS="1")
    failing(batch, "squeue", 10**6, AWAY)
    assert batch.end() == 13
    assert not batch.did("scontrol requeue")


@pytest.mark.parametrize(
    ("code", "settings", "requeued"),
    [
        (15, {}, False),
        (15, {"AFTER_EXIT": "requeue"}, True),
        (15, {"AFTER_EXIT": "requeue", "SLURM_RESTART_COUNT": "100"}, False),
    ],
)
def test_an_early_end_is_requeued_where_asked(
    tmp_path: Path, code: int, settings: dict[str, str], requeued: bool
) -> None:
    batch = Batch(tmp_path, code, **settings)
    assert batch.end() == code
    assert batch.did("scontrol requeue") == requeued


def test_the_next_task_of_an_array_continues_after_an_early_end(tmp_path: Path) -> None:
    batch = Batch(tmp_path, 15, **ARRAY)
    assert batch.end() == 15
    assert not batch.did("scancel --state=PENDING") and not batch.did(FREED)


@pytest.mark.parametrize(
    "name",
    ["plain-1.2_x", "my job", "tr\u00e4ining", "\u6a21\u578b", "a/b", ".hidden", "-x", "a\tb"],
)
def test_a_job_name_of_any_form_is_made_safe(tmp_path: Path, name: str) -> None:
    batch = Batch(tmp_path, 0, SLURM_JOB_NAME=name)
    assert batch.end() == 0
    begun = next(line for line in batch.calls.read_text().splitlines() if line.startswith("begun"))
    given = begun.split("--job ")[1].split(" --spares")[0]
    check_names(Path("/dev/shm/x"), given, ["n0"])
    assert (given == name) == (name == "plain-1.2_x"), given


def test_a_deputy_that_cannot_start_is_said(tmp_path: Path) -> None:
    batch, said = Batch(tmp_path, 0, SIGNALS="1", NODES="n0 n1"), tmp_path / "said"
    batch._write(tmp_path / "srun", "#!/bin/bash\nexit 1\n")
    words = "no deputy could be started on n1"
    saying(batch, said, words, lambda: said.exists() and words in said.read_text())


def test_raw_errors_of_a_controller_that_is_away_are_kept_out_of_the_output(tmp_path: Path) -> None:
    batch, said = Batch(tmp_path, 0, SIGNALS="1", NODES="n0 n1"), tmp_path / "said"
    for name in ("squeue", "scontrol", "scancel"):
        batch._write(tmp_path / name, f"#!/bin/bash\necho '{AWAY}' >&2\nexit 1\n")
    log = Path(batch.environment["STATE_DIR"]) / "deputies.log"
    errors = lambda: log.exists() and log.read_text().count(AWAY) >= 3  # noqa: E731
    saying(batch, said, f"errors in {log}", errors)
    assert AWAY not in said.read_text(), said.read_text()


def saying(batch: Batch, said: Path, what: str, holds: Callable[[], bool]) -> None:
    """Have it run with its output in a file until this holds, and end well."""
    command = ["bash", "-c", f"exec >{said} 2>&1; source {SUPERVISE}; supervise true"]
    with subprocess.Popen(command, env=batch.environment) as process:
        try:
            await_that(what, holds)
            batch.note_sent()
            assert process.wait(60) == 0
        finally:
            process.kill()
