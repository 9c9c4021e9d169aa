"""The position of a loader that keeps one itself, which is checked.

What ``state_dict`` gives may not change, may go back, or may lead to another batch.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from megatron_ft.trainer.loader_position import LoaderPosition, Pass
from megatron_ft.trainer.loader_trace import BatchTrace, is_right, read
from megatron_ft.trainer.state import RngState

logger = logging.getLogger(__name__)

OWN_STATE_PART = 0.002
"""Part of the time, at most, that goes into asking a loader for its own position."""


class OwnPosition(LoaderPosition):
    """A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader.

    Its position is asked for now and then.  After a restart it is set, and the batches behind it
    are read again: if they are not those of before, all batches since the pass began are counted.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._last: Pass | None = None

    def _moment(self) -> dict[str, Any]:
        moment = super()._moment()
        # The loader's own state holds those of its parts.
        return {**moment, "own": {**moment["own"], "stateful": {}}}

    def _open(self) -> Pass:
        if self._pending is not None and self._pending["over"]:
            self._stale = None
            self._pass_over()
        one = super()._open()
        if one.own is None:
            one.own = (self._asked(), 0, BatchTrace())
            one.begun["state"] = one.own[0]
        return one

    def _pass_over(self) -> None:
        """Bring the loader behind the pass that was over: only it knows how it begins the next."""
        place, now = self._pending, RngState().state_dict()
        assert place is not None
        self._pending = None
        try:
            self._last = self._replayed(place)
        finally:
            RngState().load_state_dict(now)

    def _asked(self) -> Any:
        return copy.deepcopy(self.loader.state_dict())

    def _next(self, one: Pass, end: object) -> Any:
        if (started := time.monotonic()) >= one.ask_at:
            one.own = (self._asked(), one.consumed, BatchTrace())
            ended = time.monotonic()
            one.ask_at = ended + (ended - started) / OWN_STATE_PART
        return next(one.batches, end)

    def _took(self, one: Pass, batch: Any) -> None:
        super()._took(one, batch)
        assert one.own is not None
        one.own[2].took(batch)

    def _over(self, one: Pass) -> None:
        super()._over(one)
        self._last = one

    def state_dict(self) -> dict[str, Any]:
        """See ResumableLoader; a pass that is over is read to its end again."""
        state, one = super().state_dict(), self._at or self._last
        if self._pending is not None or one is None:
            return state
        assert one.own is not None and isinstance(one.trace, BatchTrace)
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

    def _finish(self, pending: dict[str, Any]) -> None:
        self._pending = {**pending, "over": True, "finished": True}

    def _ways(self, place: dict[str, Any]) -> list[Callable[[], Pass | None]]:
        return [lambda: self._continuing(place), lambda: self._counting(place)]

    def _continuing(self, place: dict[str, Any]) -> Pass | None:
        """By the loader's own position, and the batches that were used behind it."""
        own, since, right = place["own"]
        batches, trace = self._from(own, place["consumed"] - since), BatchTrace()
        read(batches, place["consumed"] - since, trace)
        if not is_right(trace, right) or not self._ends(batches, place):
            return None
        return Pass(place["begun"], batches, BatchTrace(place["trace"]), own=(own, since, trace))

    def _counting(self, place: dict[str, Any]) -> Pass | None:
        """From the begin of the pass."""
        self._own.set(place["begun"]["own"])
        batches, trace = self._from(place["begun"]["state"], place["consumed"]), BatchTrace()
        read(batches, place["consumed"], trace)
        if not is_right(trace, place["trace"]) or not self._ends(batches, place):
            return None
        logger.warning(
            "%s: its state_dict leads to other batches than training has used; the %d batches of "
            "its pass were read again instead, and so they will be at each restart",
            *(self._name(), place["consumed"]),
        )
        own = (place["begun"]["state"], 0, BatchTrace(trace.value))
        return Pass(place["begun"], batches, trace, own=own)

    def _from(self, state: Any, count: int) -> Iterator[Any]:
        """The pass that begins with a state; one that is empty is that of the pass before."""
        self.loader.load_state_dict(copy.deepcopy(state))
        batches, end = iter(self.loader), object()
        first = next(batches, end) if count else end
        if first is not end:
            return chain((first,), batches)
        return iter(self.loader) if count else batches

    def _ends(self, batches: Iterator[Any], place: Mapping[str, Any]) -> bool:
        """False if a pass that was read to its end continues here."""
        end = object()
        return not (place["over"] and place["finished"]) or next(batches, end) is end
