"""Nothing is unpickled but in the places listed here, each with the check that comes before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("megatron_ft", "deepspeed_ext", "examples", "benchmarks", "scripts")

LOADERS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.load",
    "np.load",
    "numpy.load",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "cloudpickle.load",
    "cloudpickle.loads",
    "pd.read_pickle",
    "eval",
    "exec",
    "recv_pyobj",
}
"""Whatever can run code of the bytes that it is given."""
LAST = {loader.rpartition(".")[2] for loader in LOADERS}

ALLOWED = {
    "megatron_ft/launchers/trainer_host.py:run_script:exec": (
        "the user's own training script, named by a process of this user"
    ),
    "megatron_ft/cli/demo/final_state.py:compare_states:torch.load": "weights_only",
    "megatron_ft/trainer/accelerator_state.py:InMemoryState:torch.load": "weights_only",
    "benchmarks/device/survives.py:run_case:torch.load": "weights_only, of what the run has saved",
    "benchmarks/peers/torch_own.py:TorchSave:torch.load": "weights_only, of what it has just saved",
    "deepspeed_ext/saving.py:_step_inside:torch.load": (
        "the user's own DeepSpeed checkpoint, which DeepSpeed unpickles next"
    ),
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def loaders(path: Path) -> Iterator[str]:
    """``file:function:loader`` of every mention of a loader in a source file."""
    for function, node in _nodes(tree(path), "module"):
        last = getattr(node, "attr", getattr(node, "id", ""))
        if last not in LAST or not isinstance(node, ast.Attribute | ast.Name):
            continue
        name = ast.unparse(node)
        if name in LOADERS or last in ("recv_pyobj", "read_pickle"):
            yield f"{path.relative_to(ROOT)}:{function}:{name}"


def _nodes(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(tree):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        yield function, child
        yield from _nodes(child, child.name if named and function == "module" else function)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_every_place_that_unpickles_is_known() -> None:
    found = {place for path in sources() for place in loaders(path)}
    assert found == ALLOWED.keys(), "name the check that comes before it, and list it here"


def test_no_loader_is_imported_under_another_name() -> None:
    modules = {loader.partition(".")[0] for loader in LOADERS if "." in loader} - {"torch", "np"}
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                taken = {f"{node.module}.{alias.name}" for alias in node.names}
                assert not taken & LOADERS and node.module not in modules, f"{path}: {taken}"
            if isinstance(node, ast.Import):
                renamed = {alias.name for alias in node.names if alias.asname}
                assert not renamed & (modules - {"numpy"}), f"{path}: {renamed}"


def test_our_own_packages_know_no_pickle() -> None:
    modules = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "copyreg"}
    for path in (p for package in PACKAGES[:2] for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not named & modules, f"{path} imports {named & modules}"


@pytest.mark.parametrize("marked", [p for p, why in ALLOWED.items() if why == "weights_only"])
def test_weights_only(marked: str) -> None:
    nodes = ast.walk(tree(ROOT / marked.partition(":")[0]))
    calls = [n for n in nodes if isinstance(n, ast.Call) and "torch.load" in ast.unparse(n.func)]
    assert calls and all("weights_only=True" in ast.unparse(call) for call in calls)
