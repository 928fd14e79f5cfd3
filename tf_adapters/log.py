"""The lines that a user sees: one logger, rank 0, visible without any set-up."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

logger = logging.getLogger("tf_adapters")


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Looks ``sys.stderr`` up for each line, since it may be replaced after the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def announce(rank: int, text: str, level: int = logging.INFO) -> None:
    """Log ``timely_freeze: text`` on rank 0; to stderr if the application has not configured logging."""
    if rank != 0:
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.log(level, "timely_freeze: %s", text)
