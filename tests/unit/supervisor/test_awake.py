"""Silence of others, sleep of one's own, and leases that outlast both."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.supervisor.connections import SuspendClock
from megatron_ft.supervisor.membership import OutstandingLeases

BEAT = 0.5


BEATS = st.one_of(st.floats(0.0, 7 * BEAT), st.floats(9 * BEAT, 30 * BEAT))


@given(st.lists(BEATS, max_size=30))
def test_time_counts_but_for_gaps_of_several_beats(gaps: list[float]) -> None:
    awake = SuspendClock(BEAT)
    began = now = time.monotonic() + 100 * BEAT
    assert awake.seconds(began, began) == 0.0
    counted = 0.0
    for gap in gaps:
        now += gap
        counted += gap if gap <= 7 * BEAT else 0.0
        assert abs(awake.seconds(began, now) - counted) < 1e-6
        assert awake.seconds(now, now) == 0.0


def test_a_busy_process_still_tells_who_is_silent() -> None:
    """Late beats delay that by nothing, however many come in a row."""
    awake, start = SuspendClock(BEAT), time.monotonic()
    for beat in range(1, 20):
        assert abs(awake.seconds(start, start + beat * 6 * BEAT) - beat * 6 * BEAT) < 0.1


def test_a_loop_that_was_held_has_been_asleep() -> None:
    async def story() -> None:
        awake = SuspendClock(0.02)
        watch = asyncio.ensure_future(awake.watch())
        await asyncio.sleep(0.02)
        began = time.monotonic()
        time.sleep(0.5)  # as a process that is stopped
        assert awake.seconds(began, time.monotonic()) < 0.4
        watch.cancel()

    asyncio.run(story())


@given(st.floats(0.1, 1e3), st.floats(0.0, 1e3))
def test_a_lease_is_outstanding_from_when_its_node_was_heard(seconds: float, ago: float) -> None:
    leases = OutstandingLeases(seconds)
    now = time.monotonic()
    leases.record("n1", now - ago)
    assert abs(leases.left(["n1"]) - (seconds - ago)) < 1.0
    assert abs(leases.left(["never heard of"]) - seconds) < 1.0, "from when this one began"
    assert leases.left(["n1", "never heard of"]) >= leases.left(["n1"]) - 1.0
    assert leases.left([]) < 0 or now < seconds
