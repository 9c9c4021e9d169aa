"""The position of a loader that keeps one itself, which is checked.

What ``state_dict`` gives may not change, may go back, or may lead to another batch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from megatron_ft.trainer.loader_position import LoaderPosition, Pass
from megatron_ft.trainer.loader_trace import END, BatchTrace, first

logger = logging.getLogger(__name__)

OWN_STATE_PART = 0.002
"""Part of the time, at most, that goes into asking a loader for its own position."""


class OwnPosition(LoaderPosition):
    """A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader.

    Its position is asked for now and then.  After a restart it is set, and the batches behind it
    are read again: if they are not those of before, all batches since the pass began are counted.
    """

    _last: Pass | None = None

    def _moment(self) -> dict[str, Any]:
        moment = super()._moment()
        # The loader's own state holds those of its parts.
        return {**moment, "own": {**moment["own"], "stateful": {}}}

    def _open(self) -> Pass:
        one = super()._open()
        if one.own is None:
            one.own = (self._asked(), 0, BatchTrace())
            one.begun["state"] = one.own[0]
        return one

    def _pass_over(self, place: Mapping[str, Any]) -> None:
        # Only the loader knows how it begins the next one.
        self._last = self._replayed({**place, "over": True, "finished": True})

    def _asked(self) -> Any:
        try:
            return copy.deepcopy(self.loader.state_dict())
        except Exception as error:
            # Training goes before.
            self._warn_once(f"its state_dict raises {error!r}: its batches are counted instead")
            return None

    def _next(self, one: Pass) -> Any:
        if (started := time.monotonic()) >= one.ask_at:
            one.own = (self._asked(), one.consumed, BatchTrace())
            ended = time.monotonic()
            one.ask_at = ended + (ended - started) / OWN_STATE_PART
        assert one.own is not None
        if (batch := next(one.batches, END)) is not END:
            one.own[2].add(batch)
        return batch

    def _over(self, one: Pass) -> None:
        super()._over(one)
        self._last = one

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader; a pass that is over is read to its end again."""
        state, one = super().state_dict(), self._at or self._last
        if self._pending is not None or one is None or one.own is None:
            return state
        own, since, trace = one.own
        return {
            **state,
            "begun": one.begun,
            "consumed": one.consumed,
            "trace": one.trace.value,
            "own": [own, since, trace.value],
            "over": self._at is None,
            "finished": one.finished,
        }

    def _ways(self, place: dict[str, Any]) -> list[Callable[[], Pass | None]]:
        ways: list[Callable[[], Pass | None]]
        ways = [partial(self._continued, place, *place["own"]), partial(self._counted, place)]
        return ways[place["own"][0] is None :]

    def _counted(self, place: dict[str, Any]) -> Pass | None:
        """From the begin of the pass."""
        self._own.set(place["begun"]["own"])
        found = self._continued(place, place["begun"]["state"], 0, place["trace"])
        if found is not None:
            logger.warning(
                "%s: its state_dict leads to other batches than training has used; the %d batches "
                "of its pass were read again instead, and so they will be at each restart",
                *(self._name(), place["consumed"]),
            )
        return found

    def _continued(self, place: dict[str, Any], own: Any, since: int, right: int) -> Pass | None:
        """By a position of its own, and the batches that were used behind it."""
        count, trace = place["consumed"] - since, BatchTrace()
        batches = self._from(own, count)
        for batch in first(batches, count):
            trace.add(batch)
        ends = place["over"] and place["finished"]
        if trace.value != right or (ends and next(batches, END) is not END):
            return None
        return Pass(place["begun"], batches, BatchTrace(place["trace"]), own=(own, since, trace))

    def _from(self, state: Any, count: int) -> Iterator[Any]:
        """The pass that begins with a state; one that is empty is that of the pass before."""
        if state is not None:
            self.loader.load_state_dict(copy.deepcopy(state))
        batches: Iterator[Any] = iter(self.loader)
        if count and (begun := next(batches, END)) is not END:
            return chain((begun,), batches)
        return iter(self.loader) if count else batches
