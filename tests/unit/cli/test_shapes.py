"""Shapes: arguments that a job's command gets on fewer nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cli import main as cli
from megatron_ft.cli.shapes import parse_shapes, read_shapes
from megatron_ft.core.errors import ConfigError

MEGATRON = (
    "python pretrain_gpt.py --inmem-snapshot --micro-batch-size 1 --global-batch-size 8 "
    "--pipeline-model-parallel-size 4"
).split()


@given(st.dictionaries(st.integers(1, 6), st.none() | st.lists(st.text("-ab1 "), max_size=3)))
def test_what_is_written_is_read(shapes: dict[int, Any]) -> None:
    found = parse_shapes(json.dumps(shapes), "file", 7)
    assert found == {n: words if words is None else tuple(words) for n, words in shapes.items()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"4": []}', "'4' is not a number of nodes below the 4"),
        ('{"0": []}', "'0' is not a number of nodes"),
        ('{"02": []}', "'02' is not a number of nodes"),
        ('{"two": []}', "'two' is not a number of nodes"),
        ('{"2": "--flag 1"}', "'2' has neither a list of strings nor null"),
        ('{"2": ["--flag", 1]}', "'2' has neither a list of strings nor null"),
        ('{"2": ["--inmem-slots", "3"]}', "'2' has --inmem-slots"),
    ],
)
def test_a_file_that_is_none_of_shapes_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="^file.*" + said):
        parse_shapes(text, "file", 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pipeline-model-parallel-size", "1"], "3 data-parallel ranks"),
        (["--pipeline-model-parallel-size=2"], "3 ranks are not a multiple of 2"),
        (["--pipeline-model-parallel-size", "3"], ""),
        (
            ["--pipeline-model-parallel-size", "3", "--global-batch-size", "6"],
            "--global-batch-size is 6 instead of 8, and must stay",
        ),
        (["--step-batch-size-schedule", "0:4"], "its batches are not known here"),
        (["--yaml-cfg", "unknown"], ""),
        (None, ""),
    ],
)
def test_megatrons_flags_are_checked(tmp_path: Path, words: Any, said: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"3": words}))
    if not said:
        assert set(read_shapes(str(path), 4, 1, MEGATRON)) == {3}
        return
    with pytest.raises(ConfigError, match="3 nodes: .*" + said):
        read_shapes(str(path), 4, 1, MEGATRON)
    without_us = [word for word in MEGATRON if word != "--inmem-snapshot"]
    assert read_shapes(str(path), 4, 1, without_us), "the flags may be those of another program"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on-no-spare", "stop"], "--shapes has no effect"),
        (["--on-no-spare", "shrink"], "shapes.json cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_job_with_shapes_of_no_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, flags: list[str], said: str
) -> None:
    words = ["--nodes", "2", "--protect", "none", "--state-dir", str(tmp_path), *flags]
    words += ["--shapes", str(tmp_path / "shapes.json"), "--", "true"]
    assert cli.main([command, *words]) == 2
    assert said in capsys.readouterr().err
