"""All ranks learn whether all ranks did their part, within a stated time.

Goes through the job's key-value store, not through collectives: a rank that failed somewhere
else can still say so, a rank that is gone is named, and nothing is left half-joined.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import Any

from megatron_ft.core.errors import ControlPlaneError

_PREFIX = "deepspeed_ext/agreement"
_SLICE_SECONDS = 1.0
"""The store's client is shared with the process groups, so it is never held for long."""

_SHORTEST_SECONDS = 0.01
"""A store takes less than a millisecond for no limit at all."""

_GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait, so that they hear its decision, not a timeout."""


class Agreement:
    """Meetings of all ranks, numbered; every rank comes to each of them once, or is missed.

    ``store`` is a key-value store that all ranks share (torch.distributed.Store), ``name`` tells
    agreements in it apart.  Rank 0 collects and decides, so the cost grows with the number of
    ranks, not with its square.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta, name: str = ""
    ) -> None:
        self._store = store
        self._prefix = f"{_PREFIX}{name}"
        self._rank = rank
        self._world_size = world_size
        self._seconds = timeout.total_seconds()
        self._meeting = 0

    def meet(self, subject: str, failure: str = "") -> dict[int, str]:
        """Wait for every rank; what has failed, by rank, the same on all of them.

        ``failure`` says what failed here.  ControlPlaneError names ranks that did not come
        within the timeout; ``subject`` says for what, as "all files are written".
        """
        self._meeting += 1
        if self._rank:
            self._store.set(self._key(self._rank), failure)
            decision = self._await_decision(subject)
        else:
            decision = self._decide(failure)
        if decision["missing"]:
            raise ControlPlaneError(self._missing_text(subject, decision["missing"]))
        return {int(rank): text for rank, text in decision["failures"].items()}

    def leave(self, failure: str) -> None:
        """Tell the ranks that come to the next meeting that this one will not; waits for nobody."""
        self._meeting += 1
        if self._rank:
            self._store.set(self._key(self._rank), failure)
        else:
            self._announce({0: failure}, [])

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._meeting}/rank{rank}"

    def _decision_key(self, meeting: int) -> str:
        return f"{self._prefix}/{meeting}/decision"

    def _decide(self, own_failure: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._seconds
        failures = {0: own_failure} if own_failure else {}
        missing = []
        for rank in range(1, self._world_size):
            # Once the time is over each of the rest gets one look.
            if not self._appears(self._key(rank), deadline):
                missing.append(rank)
            elif text := self._store.get(self._key(rank)).decode():
                failures[rank] = text
            self._store.delete_key(self._key(rank))
        return self._announce(failures, missing)

    def _announce(self, failures: dict[int, str], missing: list[int]) -> dict[str, Any]:
        decision = {"failures": failures, "missing": missing}
        self._store.set(self._decision_key(self._meeting), json.dumps(decision))
        # Whoever came to this meeting has read the decision of the one before the last.
        self._store.delete_key(self._decision_key(self._meeting - 2))
        return json.loads(json.dumps(decision))  # type: ignore[no-any-return]

    def _await_decision(self, subject: str) -> dict[str, Any]:
        key = self._decision_key(self._meeting)
        deadline = time.monotonic() + self._seconds + _GRACE_SECONDS
        if not self._appears(key, deadline):
            raise ControlPlaneError(self._missing_text(subject, [0]))
        return json.loads(self._store.get(key))  # type: ignore[no-any-return]

    def _appears(self, key: str, deadline: float) -> bool:
        while not self._store.check([key]):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                slice_seconds = max(min(remaining, _SLICE_SECONDS), _SHORTEST_SECONDS)
                self._store.wait([key], timedelta(seconds=slice_seconds))
            except RuntimeError as error:  # DistStoreError where torch has it
                if "timeout" not in str(error).lower():
                    raise ControlPlaneError(
                        f"rank {self._rank} lost the job's key-value store, which rank 0 or the "
                        f"launcher serves: {error}"
                    ) from error
        return True

    def _missing_text(self, subject: str, missing: list[int]) -> str:
        return (
            f"ranks {missing} did not report within {self._seconds:.0f} s that {subject}: see "
            "their logs; DEEPSPEED_TIMEOUT (minutes) sets how long the others wait"
        )


_agreements = itertools.count()


def world_agreement(timeout: timedelta | None = None) -> Agreement:
    """Of all ranks of the default process group; the timeout is DeepSpeed's own unless given.

    Ranks make theirs in the same order, as they do with process groups.
    """
    from deepspeed.constants import default_pg_timeout
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    place = distributed.get_rank(), distributed.get_world_size()
    limit = default_pg_timeout if timeout is None else timeout
    return Agreement(_get_default_store(), *place, limit, str(next(_agreements)))
