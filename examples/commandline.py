"""What the examples' command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """One line says what is wrong; torchrun has enough to add, once for each rank."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that runs ``every`` so many steps (0: never) and after the last one runs after ``step``."""
    return step == last or (every > 0 and step % every == 0)
