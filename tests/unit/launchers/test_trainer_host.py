"""A trainer host, its clients and their children: real processes, compared with started ones."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.environment import IMPORTS_NAME, START, WHY_COLD
from megatron_ft.core.startup import before_script
from megatron_ft.launchers import trainer_host, warm_client
from megatron_ft.supervisor.trainer_hosts import why_cold

WAIT_SECONDS = 60.0
PROGRAMS = Path(__file__).parents[2] / "programs"
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class Place:
    """A folder with a script, packages that misbehave at import, and a host."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "train.py"
        self.socket = str(folder / "host.sock")
        package = folder / "path" / "megatron"
        package.mkdir(parents=True)
        for name, source in {
            "__init__": "",
            "threads": "import threading\nthreading.Thread(target=threading.Event().wait,"
            " args=(9999,), daemon=True).start()\n",
            "broken": "import os\nopen(__file__ + '.runs', 'a').write(f'{os.getpid()} ')\n"
            "raise ValueError('broken')\n",
            "variables": "import os\nos.environ.setdefault('CHOSEN', 'here')\n"
            "os.environ['SET'] = 'by import'\n",
            "learned": "",
        }.items():
            (package / f"{name}.py").write_text(source)
        (package / "package").mkdir()
        for name, source in {"__init__": "both = 'a name'", "both": "", "part": ""}.items():
            (package / "package" / f"{name}.py").write_text(source)
        customise = "import os, sys\nsys.custom = sys.__dict__.get('custom', []) + "
        (folder / "path" / "sitecustomize.py").write_text(customise + "[os.environ['RANK']]\n")
        shutil.copy(PROGRAMS / "forked_script.py", self.script)
        shutil.copy(PROGRAMS / "ends_as_told.py", folder / "ends.py")
        search = os.pathsep.join([str(folder / "path"), os.environ["PYTHONPATH"]])
        self.environment = before_script({**os.environ, **VARIABLES, "PYTHONPATH": search})
        room = {trainer_host.ROOM: "x" * (32 << 10), "RANK": "host"}
        self.log = (folder / "log").open("w")
        command = [sys.executable, trainer_host.__file__, self.socket, sys.executable]
        self.host = subprocess.Popen(
            [*command, str(self.script)],
            env={**self.environment, **room},
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,
        )

    def start(
        self, *words: str, warm: bool = True, script: str = "train.py", **more: Any
    ) -> subprocess.Popen[str]:
        """The script as a rank's process."""
        client = ["-I", "-S", warm_client.__file__, self.socket, sys.executable] if warm else []
        return subprocess.Popen(
            [sys.executable, *client, script, *words],
            cwd=self.folder,
            env={**self.environment, "RANK": "3", "CHOSEN": "there", "OMP_NUM_THREADS": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("host"))
    yield made
    made.host.kill()
    made.host.wait()
    made.log.close()


def narrow() -> None:
    """Limit this process as a launcher may limit a trainer."""
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def test_a_forked_process_is_as_a_started_one(place: Place) -> None:
    """In all that it sees of itself, and that others see of it."""
    found = []
    for warm in (True, False):
        process = place.start("0", "--flag", "-u", "-O", warm=warm, preexec_fn=narrow)
        out, err = process.communicate("given", WAIT_SECONDS)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    warm, cold = found
    assert warm["same"]["env"].pop(START) == "warm"
    warm["shown"].remove(f"{START}=warm")
    assert warm["loaded"] and not cold["loaded"]
    assert warm["same"] == cold["same"]
    assert warm["shown"] == cold["shown"]
    assert warm["same"]["custom"] == ["3"], "sitecustomize ran once, in the process itself"
    assert warm["same"]["env"]["CHOSEN"] == "there" and warm["same"]["env"]["SET"] == "by import"
    assert warm["fds"] <= cold["fds"] + 1, "the link to its client"


def test_what_cannot_be_forked_is_left_to_the_process(place: Place) -> None:
    out, _ = place.start("0").communicate("", WAIT_SECONDS)
    before = json.loads(out)["before"]
    assert {"megatron.variables", "megatron.package.part"} <= set(before)
    assert "megatron.package.both" not in before, "a name of the package, not its module"
    assert not {"megatron.threads", "megatron.broken"} & set(before)
    said = (place.folder / "log").read_text()
    assert "megatron.threads is left to the trainers: importing it starts a thread" in said


def test_a_cold_start_says_why(place: Place) -> None:
    environment = {**place.environment, "RANK": "3", "LONG": "x" * (64 << 10)}
    words = [sys.executable, "-I", "-S", warm_client.__file__, place.socket, sys.executable]
    done = subprocess.run(
        [*words, "-c", "import os; print(os.environ['MEGATRON_FT_WHY_COLD'])"],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=WAIT_SECONDS,
        text=True,
    )
    assert "cannot fork it: its variables are longer" in done.stdout
    assert WHY_COLD == warm_client.WHY_COLD


@given(st.binary(max_size=30))
def test_bytes_of_any_locale_are_the_same_on_both_sides(given: bytes) -> None:
    """The client is isolated from variables by which the host may decode otherwise."""
    raw = os.fsdecode(given)
    request = {"argv": [warm_client.as_bytes(raw)], "env": {"a": warm_client.as_bytes(raw)}}
    assert trainer_host._decoded(json.loads(json.dumps(request))) == {
        "argv": [raw],
        "env": {"a": raw},
    }


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    "variables", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C"}]
)
def test_paths_of_any_letters_start_warm_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "gr\u00f6 \u00dfe"
    folder.mkdir()
    place = Place(folder)
    (folder / "\u00f1 \u03b1.py").write_text(
        "import os, sys\nprint(os.environ['MEGATRON_FT_START'], ascii(os.fsencode(sys.argv[1])))"
    )
    try:
        process = place.start("\u00fc", script="\u00f1 \u03b1.py")
        assert process.communicate("", WAIT_SECONDS)[0].split()[0] == "warm"
    finally:
        place.host.kill()
        place.host.wait()
        place.log.close()


def test_random_numbers_differ_between_processes(place: Place) -> None:
    outs = [place.start("0").communicate("", WAIT_SECONDS)[0] for _ in range(2)]
    first, second = map(json.loads, outs)
    assert first["chance"] != second["chance"] and first["seed"] != second["seed"]


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("7", 7), ("-11", -11), ("-9", -9)])
def test_the_client_ends_as_its_child(place: Place, how: str, status: int) -> None:
    process = place.start(how)
    process.communicate("", WAIT_SECONDS)
    assert process.returncode == status


@pytest.mark.parametrize("how", ["raise", "some text"])
def test_errors_are_written_as_python_writes_them(place: Place, how: str) -> None:
    ends = []
    for warm in (True, False):
        process = place.start(how, warm=warm, script="ends.py")
        _, err = process.communicate("", WAIT_SECONDS)
        # A forked process has frames of its forerunner outside of the script's.
        ends.append((process.returncode, err.splitlines()[-1], 'ends.py", line' in err))
    assert ends[0] == ends[1] and ends[0][0] == 1


def begun(process: subprocess.Popen[str]) -> int:
    """The number of the child, once its script runs."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    return int(json.loads(process.stdout.readline())["pid"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("stopped", [False, True], ids=["", "host stopped"])
def test_a_child_ends_with_its_client(place: Place, number: signal.Signals, stopped: bool) -> None:
    process = place.start("wait")
    pid = begun(process)
    if stopped:
        place.host.send_signal(signal.SIGSTOP)
    try:
        pidfd = os.pidfd_open(pid)
        process.send_signal(number)
        status = process.wait(WAIT_SECONDS)
        assert trainer_host.select.select([pidfd], [], [], WAIT_SECONDS)[0], "the child still runs"
        os.close(pidfd)
    finally:
        place.host.send_signal(signal.SIGCONT)
    # A host that is stopped tells nobody how a child ended.
    assert status == (-signal.SIGKILL if stopped else -number)


def test_what_a_trainer_had_imported_is_imported_ahead(place: Place) -> None:
    noted = ["megatron.broken", "megatron.learned", "no.such", "os"]
    (place.folder / IMPORTS_NAME).write_text(json.dumps(noted))

    def learned() -> bool:
        out, _ = place.start("0").communicate("", WAIT_SECONDS)
        return "megatron.learned" in json.loads(out)["before"]

    deadline = time.monotonic() + WAIT_SECONDS
    while not learned():
        assert time.monotonic() < deadline, "the host does not import what was noted"
        time.sleep(2 * trainer_host.LOOK_SECONDS)  # it does so when nothing is asked of it
    runs = (place.folder / "path" / "megatron" / "broken.py.runs").read_text().split()
    assert runs.count(str(place.host.pid)) == 1, "what has failed is not imported again"


def test_without_a_host_the_command_is_started(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warm_client, "CONNECT_SECONDS", 0.1)
    assert warm_client.connect(str(tmp_path / "none")) is None
    program = str(PROGRAMS / "client_without_waiting.py")
    client = [sys.executable, "-I", "-S", program, warm_client.__file__]
    done = subprocess.run(
        [*client, str(tmp_path / "none"), "/bin/echo", "cold"], capture_output=True, check=True
    )
    assert done.stdout == b"cold\n"


def test_a_host_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection = warm_client.connect(path)
        assert connection is not None
        with connection:
            pid, why = warm_client.ask(connection, ["python3", "x.py"], 0.1)
            assert pid is None and "no answer" in why


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["python3", "train.py"], ""),
        (["/opt/bin/python3.11", "-u", "-O", "-m", "train"], ""),
        (["bash", "train.sh"], "bash is not a Python interpreter"),
        (["python", "-c", "pass"], "runs no script or module"),
        (["python", "-I", "train.py"], "runs no script or module"),
        (["python"], "runs no script or module"),
        (["python", "-m"], "names no module"),
    ],
)
def test_commands_that_can_be_forked(command: list[str], reason: str) -> None:
    assert reason in why_cold(command) and bool(reason) == bool(why_cold(command))
    assert "starts the ranks" in why_cold(command, trainer_per_node=True)


def test_imports_are_found_where_a_script_makes_them_at_once() -> None:
    source = b"""
import torch, numpy as np
from megatron.core import parallel_state, mpu as groups
from . import near
if True:
    import deepspeed
try:
    import apex
except ImportError:
    apex = None
def later():
    import pandas
"""
    names = set(trainer_host.imports_of(source))
    members = {"megatron.core:parallel_state", "megatron.core:mpu"}
    assert names == {"torch", "numpy", "deepspeed", "apex", *members}


def test_the_program_of_an_editable_installation_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "far" / "apart"
    package.mkdir(parents=True)
    for name in ("__init__", "__main__", "train"):
        (package / f"{name}.py").write_text("raise AssertionError('nothing is imported')")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return PathFinder.find_spec(name, [str(package.parent)]) if path is None else None

    with pytest.raises(ImportError, match="no module apart"):
        trainer_host.file_of("apart.train")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert trainer_host.file_of("apart.train") == str(package / "train.py")
    assert trainer_host.file_of("apart") == str(package / "__main__.py")
    with pytest.raises(ImportError, match="no module apart"):
        trainer_host.file_of("apart.other")


SOME = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"))


@given(SOME, SOME, SOME)
def test_variables_are_as_after_the_same_imports(
    before: dict[str, str], after: dict[str, str], given: dict[str, str]
) -> None:
    pairs = {name: (before.get(name), after.get(name)) for name in before | after}
    changes = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert trainer_host.after_imports(before, changes) == after
    found = trainer_host.after_imports(given, changes)
    for name in "abcd":
        kept = name not in changes or given.get(name) != before.get(name)
        assert found.get(name) == (given if kept else after).get(name)
