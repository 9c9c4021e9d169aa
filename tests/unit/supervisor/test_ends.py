"""Ends of an incarnation: the first of several detectors, and what an exit with 0 means."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from megatron_ft.core.errors import ControlPlaneError
from megatron_ft.supervisor.ends import Asked, End, Failure, NodeLost, first_end
from megatron_ft.supervisor.outcome import Outcome, judge

stopped: list[str] = []


async def finds(text: str, seconds: float = 0.0) -> End:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        stopped.append(text)
        raise
    return Asked(text)


async def fails() -> End:
    raise ControlPlaneError("a node is gone")


def test_first_end_takes_the_first_named_of_several_and_ends_the_others() -> None:
    stopped.clear()
    found = asyncio.run(first_end(finds("slow", 60), finds("first"), finds("second")))
    assert found == Asked("first")
    assert stopped == ["slow"], "what has found nothing is cancelled before the end is known"


def test_first_end_cancels_again_what_has_lost_a_cancel() -> None:
    """As wait_for does before Python 3.12, where the answer that it waits for is an error."""

    async def loses_one() -> End:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)
        return Asked("nothing")

    work = asyncio.wait_for(first_end(loses_one(), finds("first")), 10)
    assert asyncio.run(work) == Asked("first")


def test_first_end_raises_the_error_of_a_detector() -> None:
    with pytest.raises(ControlPlaneError, match="a node is gone"):
        asyncio.run(first_end(finds("slow", 60), fails()))


def test_every_kind_of_failure_has_words_of_its_own() -> None:
    def kinds(kind: type[Failure]) -> list[type[Failure]]:
        return [kind, *(one for child in kind.__subclasses__() for one in kinds(child))]

    words = [kind("x").cause for kind in kinds(Failure) if kind is not Failure]
    assert all(words)
    # A trainer has one name however it ended.
    assert len({*words}) == len(words) - 1 and NodeLost.words in words


@pytest.mark.parametrize(
    ("said", "holds", "expected"),
    [
        ([True, True], True, Outcome.FINISHED),
        ([True], True, Outcome.FINISHED),
        ([True, False], True, Outcome.EARLY),
        ([False], False, Outcome.EARLY),
        ([], True, Outcome.UNKNOWN),
        ([], False, Outcome.FINISHED),
    ],
)
def test_one_rank_that_has_not_finished_makes_an_early_end(
    said: list[bool], holds: bool, expected: Outcome
) -> None:
    assert judge(said, holds=holds, frees=False) is expected
    assert judge(said, holds=holds, frees=True) is Outcome.FINISHED
