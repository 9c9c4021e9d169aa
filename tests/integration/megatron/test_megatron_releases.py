"""Every supported release of megatron-core trains, loses a trainer and ends bit-identical."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import ROOT, log_of, trainers_with
from tests.support.megatron_jobs import check_identical, needs_megatron, packaged

RELEASES = ROOT / ".venv" / "megatron-core"
"""Where scripts/lib/environment.sh puts releases beside the one in the environment itself."""


@pytest.mark.mpi
@pytest.mark.megatron
@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("release", ["0.17.1", "0.18.2"])
@pytest.mark.all_layouts
def test_an_older_release_survives_a_kill(
    release: str, megatron_corpus: Path, tmp_path: Path
) -> None:
    folder = RELEASES / release
    if not folder.is_dir():
        pytest.skip(f"needs megatron-core {release} in {folder}: run scripts/test.sh")
    program = packaged(folder)
    with trainers_with("tests.programs.pretrain_gpt", program.environment(tmp_path)):
        job = check_identical(program, megatron_corpus, tmp_path)
    assert f"> megatron-core {release}" in log_of(job, 0)
