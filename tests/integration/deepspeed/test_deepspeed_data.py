"""Where DeepSpeed's own loaders stand, before and behind a restart."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.programs.deepspeed_saving_program import notes_of
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.deepspeed
PROGRAM = "tests.programs.deepspeed_data_program:main"


def require_same(incarnation: Any) -> None:
    assert incarnation["interrupted"] == incarnation["whole"]


def test_deepspeeds_loader_goes_on_where_it_was(deepspeed_server: WarmHost, tmp_path: Path) -> None:
    for notes in notes_of(deepspeed_server, tmp_path, "loaders", 2, PROGRAM):
        assert len(notes) == 13
        different = [name for name, n in notes.items() if n["interrupted"] != n["whole"]]
        assert not different, different


def test_a_loader_of_training_data_is_watched_and_generators_restored(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    (notes,) = notes_of(deepspeed_server, tmp_path, "training_data", 1, PROGRAM)
    assert notes["is_watched"] and notes["passes_on"] and notes["length"] == 6
    assert notes["warning"] == notes["warning_with_own"] == ""
    assert "ResumableLoader(loader)" in notes["warning_without"]
    first, again, once_more, second = notes["draws"]
    assert first == again == once_more and not set(first) & set(second)


@pytest.mark.all_layouts
def test_a_pipelines_loader_goes_on_where_it_was(
    deepspeed_server: WarmHost, tmp_path: Path
) -> None:
    for notes in notes_of(deepspeed_server, tmp_path, "pipeline", 2, PROGRAM):
        assert notes["loaders"] == ["loader1"], "the first one was not used"
        require_same(notes)
