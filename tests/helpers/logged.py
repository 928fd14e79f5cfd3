"""The lines that a user of this rank sees from us."""

from __future__ import annotations

import logging


class Lines(logging.Handler):
    """Collects them while it is entered, from a level on."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("tf_adapters").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tf_adapters").removeHandler(self)
