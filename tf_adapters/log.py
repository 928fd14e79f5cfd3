"""The lines that a user sees: one logger, rank 0, visible without any set-up."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tf_adapters")


def announce(rank: int, text: str, level: int = logging.INFO) -> None:
    """Log ``timely_freeze: text`` on rank 0. Where the application has not configured logging, to stderr."""
    if rank == 0:
        _make_visible()
        logger.log(level, "timely_freeze: %s", text)


def _make_visible() -> None:
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
