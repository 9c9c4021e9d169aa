"""The page about a job, as text: what it says, and that no text of a job becomes part of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.report.charts import Axis, duration
from megatron_ft.cli.report.curves import curves
from megatron_ft.cli.report.page import MOST_EVENTS, MOST_INCIDENTS, page
from megatron_ft.supervisor.event_log import EVENTS, LoggedEvent
from tests.support.job_story import HOSTILE, JobStory

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements and texts of a page; fails on an element that is not closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(events: Sequence[LoggedEvent], job: str = "job") -> Page:
    text = page(job, events, 1.8e9)
    assert not re.search(r"nan|inf(?![a-z])", re.sub(r"<style>.*</style>", "", text))
    text.encode()
    return Page(text)


def story(faults: int) -> JobStory:
    made = JobStory()
    made.train(9)
    for _ in range(faults):
        made.lose()
        made.train(7)
    return made


def test_all_of_a_job_with_two_faults() -> None:
    made = parsed(story(2).logged)
    words = " ".join(made.words)
    for part in ("Timeline", "Where the time went", "By incarnation", "Recoveries in parts"):
        assert part in words
    for part in ("Progress", "Iterations", "Exposure", "Incidents", "Events"):
        assert part in words
    assert "8 from parity" in words and "node loss" in words
    assert "The newest" not in words
    assert {"script", "img", "link"}.isdisjoint(made.elements)


def test_text_of_a_job_stays_text() -> None:
    made = JobStory()
    made.train(5)
    made.lose(HOSTILE, HOSTILE)
    made.add(1, HOSTILE, HOSTILE)
    made.events[0]["text"] = HOSTILE
    harmless = story(1)
    harmless.add(1, "finished")
    found = parsed(made.logged, HOSTILE)
    assert found.elements.keys() == parsed(harmless.logged).elements.keys()
    assert not any(name.startswith("on") or name in {"src", "href"} for name in found.attributes)
    assert "<script>alert(1)</script>" in "".join(found.words)


def test_a_job_of_a_thousand_faults_is_cut_and_says_so() -> None:
    text = page("job", story(1000).logged, 1.8e9)
    assert len(text) < 600_000
    words = " ".join(Page(text).words)
    assert f"The newest {MOST_INCIDENTS} of 1,000 incidents" in words
    assert f"The newest {MOST_EVENTS} of " in words and "of 1,001 incarnations" in words
    assert "By kind" in words


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_job_in_its_first_seconds(count: int) -> None:
    words = " ".join(parsed(JobStory().logged[:count]).words)
    assert "Where the time went" in words and ("Timeline" in words) == (count > 1)


def test_curves_of_progress() -> None:
    made = JobStory()
    made.train(6)
    made.lose()
    made.train(2)
    found = curves(made.logged)
    # Training began after 4 s, and again 5.5 s after the fault was known.
    assert found.reached == [[(4, 0), (6, 2), (8, 4), (10, 6), (10, 6)], [(15.5, 4), (20.5, 6)]]
    assert [value for _, value in found.pace] == [1, 1, 1, 2.5]
    assert found.exposed["local"][0][-1] == (10, 0) and found.exposed["protected"][0][-1] == (10, 2)
    highest = {name: max(v for _, v in curve[0]) for name, curve in found.exposed.items()}
    assert highest == {"local": 2, "protected": 4}


def test_a_snapshot_that_is_protected_late_is_as_old_as_it_is() -> None:
    made = JobStory()
    made.train(3)
    made.add(5, "committed", iteration=2, level="protected")
    found = curves(made.logged).exposed
    # Training began after 4 s, and iteration 2 was committed after 6.
    assert found["protected"] == [[(4, 0), (12, 8), (12, 6)]]
    assert found["local"] == [[(4, 0), (6, 2), (6, 0), (12, 6), (12, 6)]]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0123, "0.0123 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (3725, "1 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize("wall", [1e-4, 0.3, 7, 299, 3000, 1e5, 1e7])
def test_an_axis_has_a_few_ticks(wall: float) -> None:
    texts = [part for part in Axis(wall).ticks(10) if part.startswith("<text")]
    assert 2 <= len(texts) <= 9 and len(set(texts)) == len(texts)


def written(folder: Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The state folder with these events; the flags that name it."""
    state = folder / "state" / "gpt"
    for made in (state.parent, state):
        made.mkdir(mode=0o700)
    path = state / EVENTS
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    path.chmod(0o600)
    return ["report", "--job", "gpt", "--state-dir", str(state.parent)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = written(tmp_path, story(1).events)
    target = tmp_path / "page.html"
    target.write_text("an older one")
    assert main([*flags, "--output", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert "<title>gpt: job report</title>" in target.read_text()
    assert main([*flags, "--output", str(tmp_path / "absent" / "page.html")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "state"]


def test_a_job_without_events_is_named(tmp_path: Path, capsys: Any) -> None:
    assert main(written(tmp_path, [])) == 2
    assert "has no events" in capsys.readouterr().err
