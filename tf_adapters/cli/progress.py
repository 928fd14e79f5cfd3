"""A line on standard error about the progress of a long computation."""

from __future__ import annotations

import sys
import threading
import time

_QUIET_S = 2.0  # work that ends sooner prints nothing
_REWRITE_S, _LINE_S = 0.25, 2.0  # between updates of the one line on a terminal, and between lines elsewhere
_COLUMNS = 100


class ProgressLine:
    """Shows the newest text that it is called with, and the seconds since it was entered.

    A terminal has one line, rewritten and erased at the end. A file or a pipe gets a line every two seconds. A thread
    prints, so the seconds also count while a solver reports nothing.
    """

    def __init__(self, command: str) -> None:
        self._command, self._text = command, ""
        self._stream, self._ended = sys.stderr, threading.Event()
        self._terminal, self._printed = self._stream.isatty(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, text: str) -> None:
        """Show ``text``, one line, from now on."""
        self._text = text

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal and self._printed:
            self._stream.write(f"\r{'':{_COLUMNS}}\r")
            self._stream.flush()

    def _run(self) -> None:
        began, wait = time.monotonic(), _QUIET_S
        while not self._ended.wait(wait):
            line = f"{self._command}: {time.monotonic() - began:.0f} s, {self._text}"
            wait = _REWRITE_S if self._terminal else _LINE_S
            self._stream.write(f"\r{line[:_COLUMNS]:{_COLUMNS}}" if self._terminal else f"{line}\n")
            self._stream.flush()
            self._printed = True
