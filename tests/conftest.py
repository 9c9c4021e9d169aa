"""Shared by all tests: nothing that a test file starts may outlive that file."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import select
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from megatron_ft.cli import clean
from megatron_ft.launchers.virtual import default_root
from tests.support.job_folders import unused

REPOSITORY = Path(__file__).parents[1]
SHORT = REPOSITORY / "tests" / "unit"
"""Where no file takes as long as the longest jobs do."""
# Children inherit it, so processes of this run are told apart from those of any other.
SESSION_VARIABLE = "MEGATRON_FT_TEST_SESSION"
SESSION = uuid.uuid4().hex
SHARED: list[Any] = []
"""Trainer hosts: all files share them, and they end with the run."""
GRACE_SECONDS = 5.0
LONG = {"deepspeed", "megatron", "mpi", "slow", "slurm"}
"""Markers of tests that start many processes, or run for ten seconds."""
LONG_TESTS = 40
"""How many others take as long as one of them."""
FRAMEWORKS = ("megatron", "deepspeed")
"""In the names of tests that need the host of a framework, whose imports take long."""
TEST_SECONDS = 120.0
"""A hang's limit for a test that is a coroutine."""
FOLDER_SECONDS = 20.0
"""A folder may be between two processes of a job of another worker."""

CI_EXAMPLES = 50
"""Of a property that asks for no number; with --all as many as Hypothesis takes, 100."""

# An example takes as long as other processes let it: how long says nothing about the property.
PROFILE = settings.get_current_profile_name()
settings.register_profile(
    PROFILE,
    settings.get_profile(PROFILE),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        "--all-layouts",
        dest="all_layouts",
        action="store_true",
        help="Everything that CI leaves out as it takes too long: every cell of Megatron's matrix "
        "of layouts, not only those that pair all values; every cell after a crash too, not only "
        "after the loss of nodes; every way to cut a network and to suspend a process; longer "
        "jobs on Slurm; the random campaign; jobs of the benchmarks.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --all asks for; jobs first, then long files where files run side by side.

    A worker that began a long file last would run alone at the end, and a file may be one long job.
    """
    left_out = [item for item in items if "all_layouts" in item.keywords]
    if left_out and not config.getoption("all_layouts"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "all_layouts" not in item.keywords]
    if hasattr(config, "workerinput"):
        lengths: Counter[Path] = Counter()
        for item in items:
            lengths[item.path] += 1 if LONG.isdisjoint(item.keywords) else LONG_TESTS
        items.sort(key=lambda item: (SHORT in item.path.parents, -lengths[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In CI one worker runs all tests of a framework, so that one host imports it."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("dist") != "loadfile" or not whole or config.getoption("all_layouts"):
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFramework(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((name for name in FRAMEWORKS if name in nodeid), file)

    return ByFramework(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, TEST_SECONDS))
    return True


def pytest_collection_finish() -> None:
    """What was collected stays to the end: no garbage collection needs to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The matrix of layouts as a table."""
    if not config.getoption("all_layouts"):
        return
    passed = {
        report.nodeid.partition("[")[2].rstrip("]"): outcome == "passed"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if "test_megatron_resume.py" in report.nodeid and "[" in report.nodeid
    }
    if passed:
        from tests.support.megatron_layouts import table

        terminalreporter.section("layouts of Megatron")
        terminalreporter.write_line(table(passed))


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("all_layouts"):
        settings.register_profile(PROFILE, settings.get_profile(PROFILE), max_examples=CI_EXAMPLES)
    os.environ[SESSION_VARIABLE] = SESSION
    # Small enough for the tensors of the small models here.
    os.environ["MEGATRON_FT_SPLIT_BYTES"] = "1024"
    # Programs that tests start import tests.support by its full name.
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.fixture(scope="module", autouse=True)
def no_job_folder_left() -> Iterator[None]:
    """Fail a test file after which a new job folder that nobody uses stays in shared memory.

    Tests of another worker, or of somebody else, may be about to remove theirs, so each gets a
    moment to go; and those are passed over that are led from outside of this run.
    """
    before = {folder.path for folder in clean.find_jobs(default_root())}
    yield
    deadline = time.monotonic() + FOLDER_SECONDS
    while (left := _unused_folders() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"job folders outlived their test file: {sorted(map(str, left))}"


def _unused_folders() -> set[Path]:
    return unused(default_root(), {os.getpid(), *_session_processes()})


@pytest.fixture(scope="module", autouse=True)
def no_process_left(no_job_folder_left: None) -> Iterator[None]:
    """Fail a test file after which processes of it still run, and end those.

    Processes may take a moment to go after they were told to; each is awaited.
    """
    before = set(_session_processes())
    yield
    shared = {server.pid for server in SHARED}
    stuck = _outliving(set(_session_processes()) - before - shared)
    commands = [f"{pid}: {_command(pid)}" for pid in stuck]
    for pid in stuck:
        _kill(pid)
    assert not stuck, "processes outlived their test file:\n" + "\n".join(commands)


def _session_processes() -> Iterator[int]:
    marker = f"{SESSION_VARIABLE}={SESSION}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                variables = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if marker in variables.split(b"\0"):
                yield int(name)


def _outliving(pids: set[int]) -> list[int]:
    deadline = time.monotonic() + GRACE_SECONDS
    return sorted(pid for pid in pids if not _ends_by(pid, deadline))


def _ends_by(pid: int, deadline: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        remaining = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([descriptor], [], [], remaining)
        return bool(ready)
    finally:
        os.close(descriptor)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "gone"


@pytest.fixture(scope="session")
def megatron_server() -> Iterator[Any]:
    """The process that Megatron's ranks are forked from; tests that use it need Megatron."""
    from megatron_ft.cli.demo import demo_model

    environment = demo_model.ENVIRONMENT | {"PYTHONWARNINGS": "ignore"}
    yield from _shared_host("tests.programs.megatron_program", environment)


def _shared_host(*given: Any) -> Iterator[Any]:
    from tests.support.warm_host import WarmHost

    host = WarmHost(*given)
    SHARED.append(host)
    yield host
    host.close()


@pytest.fixture(scope="session")
def megatron_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small corpus."""
    from megatron_ft.cli.demo import stdlib_corpus

    return stdlib_corpus.prepare(tmp_path_factory.mktemp("corpus"), max_bytes=200_000)


@pytest.fixture
def smp(tmp_path: Path) -> Iterator[Any]:
    """An SMP of one trainer in this process, without an arena yet."""
    from tests.support.captures import FakeSmp

    fake = FakeSmp(tmp_path)
    yield fake
    if fake.arena is not None:
        fake.arena.close()


@pytest.fixture
def runs(megatron_server: Any, megatron_corpus: Path, tmp_path: Path) -> Any:
    """Runs of Megatron in this test's folder; see megatron_runs.Runs."""
    from tests.support.megatron_runs import Runs

    return Runs(megatron_server, tmp_path, megatron_corpus)


@pytest.fixture(scope="session")
def warm_host() -> Iterator[Any]:
    """The trainer host of all jobs of the examples."""
    yield from _shared_host()


@pytest.fixture(scope="module")
def warm_trainers(warm_host: Any, no_process_left: None) -> Iterator[None]:
    """Trainers of jobs in this file are forked from a host that they share."""
    yield from _trainers_of(warm_host)


@pytest.fixture(scope="module")
def warm_megatron_trainers(megatron_server: Any, no_process_left: None) -> Iterator[None]:
    """The same for Megatron."""
    yield from _trainers_of(megatron_server)


@pytest.fixture(scope="module")
def warm_deepspeed_trainers(deepspeed_server: Any, no_process_left: None) -> Iterator[None]:
    """The same for DeepSpeed."""
    yield from _trainers_of(deepspeed_server)


@pytest.fixture(scope="module")
def warm_client_trainers(clients_server: Any, no_process_left: None) -> Iterator[None]:
    """The same for transformers and other clients of DeepSpeed."""
    yield from _trainers_of(clients_server)


def _trainers_of(host: Any) -> Iterator[None]:
    from tests.support.jobs import trainers_of

    with trainers_of(host):
        yield


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """Jobs to be destroyed, with everything they started, after the test."""
    jobs: list[Any] = []
    yield jobs
    for job in jobs:
        job.cluster.destroy()
        if getattr(job, "network", None) is not None:
            job.network.close()


@pytest.fixture(scope="session")
def deepspeed_server() -> Iterator[Any]:
    """The process that DeepSpeed's ranks are forked from; tests that use it need DeepSpeed."""
    from tests.programs.deepspeed_program import ENVIRONMENT

    yield from _shared_host("tests.programs.deepspeed_program", ENVIRONMENT)


@pytest.fixture(scope="session")
def clients_server() -> Iterator[Any]:
    """The same, where all clients of DeepSpeed were imported."""
    from tests.programs.clients_program import ENVIRONMENT

    yield from _shared_host("tests.programs.clients_program", ENVIRONMENT)


@pytest.fixture
def deepspeed_runs(deepspeed_server: Any, tmp_path: Path) -> Any:
    """Runs of DeepSpeed in this test's folder; see deepspeed_runs.Runs."""
    from tests.support.deepspeed_runs import Runs

    return Runs(deepspeed_server, tmp_path)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, no_process_left: None) -> Iterator[Any]:
    """A Slurm of five nodes; see slurm_cluster.SlurmCluster."""
    from tests.support.slurm_cluster import SlurmCluster

    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 5)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm_job_name() -> Iterator[str]:
    """The name of a job whose memory is freed after the test."""
    name = f"slurm-{uuid.uuid4().hex[:8]}"
    yield name
    for folder in default_root().glob(f"{name}*"):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def submit(slurm: Any, tmp_path: Path, slurm_job_name: str) -> Callable[..., Any]:
    """Submits one job to the test's Slurm; takes what slurm_jobs.SlurmJob does."""
    from tests.support.slurm_jobs import SlurmJob

    return partial(SlurmJob, slurm, tmp_path, slurm_job_name)


@pytest.fixture(scope="session")
def known_runs() -> dict[tuple[int, int], Any]:
    """Results of ``uninterrupted`` by ranks and iterations, for all files of a worker."""
    return {}


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
    warm_trainers: None,
    known_runs: dict[tuple[int, int], Any],
) -> Callable[[int, int], Any]:
    """Computes, once for each size, the result of the plain example without faults."""
    from tests.support.jobs import oracle

    def run(ranks: int, until: int) -> Any:
        if (ranks, until) not in known_runs:
            folder = tmp_path_factory.mktemp("oracle")
            known_runs[ranks, until] = oracle(folder, ranks, until)
        return known_runs[ranks, until]

    return run


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, uninterrupted: Callable[[int, int], Any]) -> Any:
    """Result of two ranks after 40 iterations, or after the file's ITERATIONS.

    It is computed before a test's job begins: the folder of a job that has ended, kept while
    something is computed to compare it with, looks abandoned to the other test workers.
    """
    return uninterrupted(2, getattr(request.module, "ITERATIONS", 40))
