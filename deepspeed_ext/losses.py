"""The losses of an engine's iteration, for the gate that keeps bad snapshots from counting."""

from __future__ import annotations

import logging
from typing import Any

from megatron_ft.core.wrapping import Function
from megatron_ft.trainer.manager_protocol import Manager

log = logging.getLogger(__name__)


class LossReport:
    """Collects what this rank gives ``backward``, or what ``train_batch`` returns.

    Reading a loss waits for the device, so nothing is collected unless the gate is ``on``.  The
    first loss that is no number ends it with a warning, never training.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._losses: list[Any] = []

    def around_backward(self, original: Function, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """``backward``, which is given the loss of one micro-batch."""
        # Detached before it is scaled, which happens in place in some releases.
        self._losses.append(loss.detach().clone() if hasattr(loss, "detach") else loss)
        return original(loss, *args, **kwargs)

    def end_step(self, manager: Manager, result: Any) -> None:
        """Report the mean over the micro-batches of the iteration that ends.

        ``result`` is what its last call returned: the loss, if no backward was seen.
        """
        losses, self._losses = self._losses or [result], []
        if not self.on:
            return
        try:
            manager.report_loss(sum(float(loss) for loss in losses) / len(losses))
        except (TypeError, ValueError, RuntimeError) as error:
            self.on = False
            log.warning("losses are no longer judged: %r", error)
