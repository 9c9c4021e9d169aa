"""The report in a real browser: it renders in light and dark and on paper, and asks for nothing."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from megatron_ft.cli.report.command import write_report
from tests.support.browser import MISSING, visit
from tests.support.job_story import HOSTILE, JobStory

pytestmark = [
    pytest.mark.all_layouts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

SECTIONS = ("Timeline", "Where the time went", "Recoveries in parts", "Progress", "Events")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    made = JobStory()
    made.train(9)
    for text in ("n1 is lost", HOSTILE):
        made.lose(text)
        made.train(7)
    path = tmp_path / "report.html"
    write_report(path, HOSTILE, made.events)
    return path


def ground(picture: Path) -> tuple[int, int, int]:
    """The colour of the first pixel: without neighbours, no filter of PNG changes it."""
    raw = picture.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    data, at = b"", 8
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        if raw[at + 4 : at + 8] == b"IDAT":
            data += raw[at + 8 : at + 8 + length]
        at += length + 12
    red, green, blue = zlib.decompress(data)[1:4]
    return red, green, blue


@pytest.mark.parametrize(("dark", "colour"), [(False, (255, 255, 255)), (True, (22, 24, 28))])
def test_it_renders(report: Path, tmp_path: Path, dark: bool, colour: tuple[int, ...]) -> None:
    picture, empty = tmp_path / "report.png", tmp_path / "empty.png"
    seen = visit(report, picture, dark=dark)
    assert seen.complaints == []
    assert all(f"<h2>{section}</h2>" in seen.document for section in SECTIONS)
    assert "<script" not in seen.document and "<img" not in seen.document
    assert ground(picture) == colour
    (tmp_path / "empty.html").write_text("<!DOCTYPE html>")
    visit(tmp_path / "empty.html", empty)
    assert picture.stat().st_size > 5 * empty.stat().st_size


def test_it_can_be_printed(report: Path, tmp_path: Path) -> None:
    paper = tmp_path / "report.pdf"
    assert visit(report, paper, "print-to-pdf", dark=True).complaints == []
    assert paper.read_bytes().startswith(b"%PDF") and paper.stat().st_size > 20_000


@pytest.mark.parametrize(
    "added", ["<script>alert(1)</script>", "<img src='http://127.0.0.1:9/x.png'>"]
)
def test_a_script_or_a_request_would_be_noticed(report: Path, tmp_path: Path, added: str) -> None:
    report.write_text(report.read_text() + added)
    complaints = visit(report, tmp_path / "spoilt.png").complaints
    assert complaints and "Content Security Policy" in complaints[0]
