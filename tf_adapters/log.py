"""The lines that a user sees: one logger, rank 0, visible without any set-up."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

logger = logging.getLogger("tf_adapters")


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is when a line is logged, not to what it was when the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(rank: int, text: str, level: int = logging.INFO) -> None:
    """Log ``timely_freeze: text`` on rank 0. Where the application has not configured logging, to stderr."""
    if rank != 0:
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.log(level, "timely_freeze: %s", text)
