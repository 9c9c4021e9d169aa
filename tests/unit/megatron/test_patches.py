"""The patches for forks of Megatron-LM and the script that applies them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ft.cli.demo import demo_model
from tests.support import traced_script

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "patch-megatron.sh"
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
ARGUMENTS, VERSION = "megatron/training/arguments.py", "megatron/core/package_info.py"
FITS, APPLIED, WRONG = 1, 0, 2

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def patch(verb: str, folder: Path | str) -> tuple[int, str]:
    command = [str(SCRIPT), verb, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def installed_megatron() -> Path | None:
    """The folder that holds the ``megatron`` of the installed megatron-core."""
    if find_spec("megatron") is None or (spec := find_spec("megatron.training")) is None:
        return None
    return Path(str(spec.origin)).parents[2]


def sources() -> Iterator[tuple[str, Path | None]]:
    yield "installed", installed_megatron()
    checkout = os.environ.get(traced_script.CHECKOUT)
    yield "checkout", Path(checkout) if checkout else None


@pytest.fixture(params=sources(), ids=lambda source: source[0])
def fork(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the two files that matter of a real Megatron."""
    name, source = request.param
    if source is None:
        wanted = (
            "megatron-core with megatron.training"
            if name == "installed"
            else (f"{traced_script.CHECKOUT} to name a checkout of Megatron-LM")
        )
        pytest.skip(f"needs {wanted}")
    for file in (ARGUMENTS, VERSION):
        (tmp_path / "fork" / file).parent.mkdir(parents=True)
        shutil.copy(source / file, tmp_path / "fork" / file)
    return tmp_path / "fork"


def test_applied_checked_and_reversed_on_a_real_file(fork: Path) -> None:
    original = (fork / ARGUMENTS).read_bytes()
    assert patch("check", fork)[0] == FITS
    assert patch("reverse", fork)[0] == 0, "nothing to reverse"
    assert (fork / ARGUMENTS).read_bytes() == original
    for _ in range(2):
        code, text = patch("apply", fork)
        assert code == 0 and "applied" in text
    assert patch("check", fork)[0] == APPLIED
    patched = (fork / ARGUMENTS).read_text()
    assert patched.count("megatron_ft.megatron.install()") == 1
    compile(patched, ARGUMENTS, "exec")
    assert patch("reverse", fork)[0] == 0
    assert (fork / ARGUMENTS).read_bytes() == original


def test_a_repository_around_the_fork_does_not_swallow_the_patch(fork: Path) -> None:
    subprocess.run(["git", "init", "-q", str(fork.parent)], check=True, timeout=30)
    assert patch("apply", fork)[0] == 0
    assert "megatron_ft" in (fork / ARGUMENTS).read_text()


def test_a_fork_that_changed_the_place_is_left_alone(fork: Path) -> None:
    changed = (fork / ARGUMENTS).read_text().replace("Parse all arguments", "Read arguments")
    (fork / ARGUMENTS).write_text(changed)
    for verb in ("check", "apply", "reverse"):
        code, text = patch(verb, fork)
        assert code == WRONG
        assert "does not fit" in text and ARGUMENTS in text
    assert (fork / ARGUMENTS).read_text() == changed


def test_another_release_is_refused_and_known_ones_are_named(fork: Path) -> None:
    info = (fork / VERSION).read_text()
    (fork / VERSION).write_text(re.sub(r"MINOR = \d+", "MINOR = 12", info))
    code, text = patch("check", fork)
    assert code == WRONG
    assert "no patch for Megatron-LM 0.12" in text and "0.19" in text and "0.20" in text


@pytest.mark.parametrize(
    ("verb", "folder", "message"),
    [
        ("patch", ".", "usage"),
        ("apply", "{empty}/gone", "no folder {empty}/gone"),
        ("apply", str(ROOT), "is no checkout of Megatron-LM"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    tmp_path: Path, verb: str, folder: str, message: str
) -> None:
    code, text = patch(verb, folder.format(empty=tmp_path))
    assert code == WRONG and message.format(empty=tmp_path) in text


def test_each_patch_adds_lines_to_one_file_and_takes_none_away() -> None:
    assert PATCHES
    for path in PATCHES:
        lines = path.read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("@@"))
        body = lines[start + 1 :]
        assert len(body) == 10, "one hunk with one line of context on each side"
        assert all(line.startswith("+") for line in body[1:-1])


_PROGRAM = """
import sys
from megatron.training import arguments, training

def options():
    return vars(arguments.parse_args(ignore_unknown_args=True))

package, sys.modules["megatron_ft"] = sys.modules.get("megatron_ft"), None
assert "inmem_snapshot" not in options(), "not installed, so not asked for"
assert not hasattr(training.setup_model_and_optimizer, "__wrapped__")
sys.modules["megatron_ft"] = package
assert options()["inmem_snapshot"] and options()["inmem_snapshot_interval"] == 7
assert hasattr(training.setup_model_and_optimizer, "__wrapped__")
"""


@pytest.mark.megatron
@pytest.mark.slow
def test_a_patched_megatron_has_the_flags_where_the_package_is_installed(tmp_path: Path) -> None:
    source = installed_megatron()
    if source is None:
        pytest.skip("needs megatron-core with megatron.training")
    shutil.copytree(source / "megatron", tmp_path / "megatron")
    assert patch("apply", tmp_path)[0] == 0
    variables = {**os.environ, **demo_model.ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--inmem-snapshot", "--inmem-snapshot-interval", "7"],
        env=traced_script.environment(tmp_path / "trace", variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
