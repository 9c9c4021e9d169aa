"""A script that knows nothing of us gets the hooks, and no other process pays for it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli.demo import demo_model
from megatron_ft.core import environment
from megatron_ft.core.errors import UnsupportedVersionError
from megatron_ft.core.frameworks import MEGATRON
from megatron_ft.core.startup import AFTER_IMPORT, FOLDER, HOOKS, LOOP, before_script, sitecustomize
from megatron_ft.core.startup.sitecustomize import AfterImport, call_hook
from megatron_ft.megatron import hooks
from tests.support import traced_script

ROOT = Path(__file__).parents[3]

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron-core with megatron.training",
)


def run_python(code: str, *folders: Path, **variables: str) -> str:
    """The output of a Python whose PYTHONPATH holds these folders and nothing else."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEGATRON_FT_", "PYTHON"))}
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


# The search path


@given(st.lists(st.sampled_from(["", "/a", "/b", str(FOLDER)])))
def test_the_folder_comes_first_once_and_all_others_stay(entries: list[str]) -> None:
    result = before_script({"PYTHONPATH": os.pathsep.join(entries), "HOME": "/h"})
    first, *rest = result["PYTHONPATH"].split(os.pathsep)
    assert first == str(FOLDER)
    assert rest == [entry for entry in entries if entry not in ("", str(FOLDER))]
    assert result["HOME"] == "/h"
    assert before_script(result) == result


def test_without_a_search_path_the_current_folder_is_not_added() -> None:
    assert before_script({})["PYTHONPATH"] == str(FOLDER)


def test_every_hook_is_a_function_that_needs_no_arguments() -> None:
    for hook in HOOKS.values():
        module, _, function = hook.rstrip("?").partition(":")
        found = find_spec(module)
        assert found is not None and found.origin is not None
        assert re.search(
            rf"^def {function}\((|[^\n]* = None)\)", Path(found.origin).read_text(), re.M
        )


def test_nothing_in_the_folders_can_hide_a_module_of_the_script() -> None:
    for folder in (FOLDER, Path(traced_script.__file__).parent):
        assert {path.name for path in folder.iterdir()} <= {
            *("__init__.py", "sitecustomize.py", "__pycache__")
        }


# What every Python process under a supervisor runs

_MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
WATCHING = {AFTER_IMPORT: before_script({})[AFTER_IMPORT]}
WAITED_FOR = "3"
"""Finders that wait for an import: of runpy, of Megatron's loop, of DeepSpeed's engine."""

_FINDERS = "import sys; print([type(f).__name__ for f in sys.meta_path].count('AfterImport'))"


def test_other_processes_import_next_to_nothing_for_it() -> None:
    plain = set(json.loads(run_python(_MODULES)))
    ours = set(json.loads(run_python(_MODULES, FOLDER, **WATCHING)))
    light = {"sitecustomize", "importlib", "importlib.machinery", "importlib._bootstrap"}
    assert ours - plain <= light | {"importlib._bootstrap_external", "_warnings", "warnings"}


def test_only_a_supervised_process_watches_imports() -> None:
    assert sitecustomize.AFTER_IMPORT == AFTER_IMPORT
    assert run_python(_FINDERS, FOLDER).split() == ["0"]
    assert run_python(_FINDERS, FOLDER, **WATCHING).split() == [WAITED_FOR]


def test_hidden_sitecustomizes_run_in_turn_and_the_last_takes_the_place(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("HERE = 1\nprint('the cluster speaks')\n")
    code = f"import sitecustomize; assert sitecustomize.HERE\n{_FINDERS}"
    ours = (FOLDER, Path(traced_script.__file__).parent)
    output = run_python(code, *ours, ROOT, tmp_path, **WATCHING)
    assert output.split("\n") == ["the cluster speaks", WAITED_FOR, ""]


# Calling behind an import


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that is not imported yet; finders that a test adds are taken away again."""
    name = f"watched_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("def train():\n    return 'original'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return name


def test_the_call_comes_behind_the_body_and_before_any_importer(watched: str) -> None:
    def wrap() -> None:
        calls.append(watched)
        sys.modules[watched].train = lambda: "wrapped"  # type: ignore[attr-defined]

    calls: list[str] = []
    AfterImport(watched, wrap).install()
    assert find_spec(watched) is not None, "looking for it"
    assert calls == [], "is not importing it"
    scope: dict[str, object] = {}
    exec(f"from {watched} import train\nresult = train()\nimport {watched}", scope)
    assert scope["result"] == "wrapped"
    assert calls == [watched]
    module = sys.modules[watched]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__


def test_what_is_installed_later_calls_later(watched: str) -> None:
    calls: list[str] = []
    AfterImport(watched, lambda: calls.append("first")).install()
    AfterImport(watched, lambda: calls.append("second")).install()
    importlib.import_module(watched)
    assert calls == ["first", "second"]


def test_an_error_fails_the_import_and_the_next_one_calls_again(watched: str) -> None:
    calls: list[int] = []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise UnsupportedVersionError("too old")

    AfterImport(watched, fail_once).install()
    with pytest.raises(UnsupportedVersionError, match="too old"):
        importlib.import_module(watched)
    assert watched not in sys.modules
    importlib.import_module(watched)
    assert len(calls) == 2


# What is called


def test_an_interpreter_without_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron_ft.megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron_ft", None)
    call_hook(LOOP, HOOKS[LOOP])
    assert f"not installed for {sys.executable}" in capsys.readouterr().err


def test_an_unsupported_release_stops_only_who_asks_for_snapshots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise UnsupportedVersionError("Megatron 0.16 is too old")

    monkeypatch.setattr(hooks, "install", refuse)
    with pytest.raises(UnsupportedVersionError):
        hooks.install_for_script(["pretrain_gpt.py", "--lr", "1", "--inmem-snapshot"])
    hooks.install_for_script(["tokenize.py"])
    assert capsys.readouterr().err == "megatron-ft: Megatron 0.16 is too old\n"


# The real Megatron, in a process that torchrun started


def start_under_supervision(script: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun as a trainer's command would, with these folders first."""
    base = {**os.environ, **demo_model.ENVIRONMENT, environment.JOB: "job"}
    base["PYTHONPATH"] = os.pathsep.join(map(str, (*folders, ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)],
        env=before_script(before_script(base, Path(traced_script.__file__).parent)),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
@pytest.mark.all_layouts
def test_a_grandchild_of_the_command_is_wrapped_and_its_children_are_not_in_the_way(
    tmp_path: Path,
) -> None:
    script = tmp_path / "pretrain_mine.py"
    shutil.copy(ROOT / "tests/programs/spawning_script.py", script)
    done = start_under_supervision(script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"child ({WAITED_FOR}, False, False)" in done.stdout
    assert "parsed True 7" in done.stdout


@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
def test_an_unsupported_megatron_is_refused_by_name_before_anything_else(tmp_path: Path) -> None:
    training = find_spec("megatron.training")
    assert training is not None and training.origin is not None
    shutil.copytree(Path(training.origin).parents[1], tmp_path / "megatron")
    loop = tmp_path / "megatron" / "training" / "training.py"
    loop.write_text(loop.read_text().replace("checkpoint_and_decide_exit", "maybe_exit"))
    script = tmp_path / "pretrain_mine.py"
    script.write_text(
        "import sys\nsys.argv.append('--inmem-snapshot')\n"
        "from megatron.training import pretrain\nprint('it continued')\n"
    )
    done = start_under_supervision(script, tmp_path)
    assert done.returncode != 0 and "it continued" not in done.stdout
    name = "no function megatron.training.training.checkpoint_and_decide_exit"
    assert name in done.stderr and MEGATRON.working in done.stderr


@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
def test_snapshots_without_a_supervisor_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    flags = demo_model.demo_arguments(data_path=tmp_path / "no corpus is needed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.programs.pretrain_gpt", *flags, "--inmem-snapshot"],
        env={**os.environ, **demo_model.ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "NotUnderSupervisorError: MEGATRON_FT_JOB" in done.stderr, done.stderr[-4000:]
    assert "megatron-ft run -- <command>" in done.stderr
