"""Warnings of what keeps happening, without a flood of them."""

from __future__ import annotations

import logging


class Warner:
    """Warns at the first of a kind; later ones go to the log at level INFO."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned: set[str] = set()

    def __call__(self, once_per: str, message: str, *values: object) -> None:
        """Log ``message`` with its ``values``; ``once_per`` names the kind."""
        level = logging.INFO if once_per in self._warned else logging.WARNING
        self._warned.add(once_per)
        self._logger.log(level, message, *values)
