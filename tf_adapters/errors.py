"""The errors of this package. Every message is one line that names the field, the value and what is allowed."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class TimelyFreezeError(Exception):
    """Base of every error that tf_adapters raises on purpose."""


class ConfigError(TimelyFreezeError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class ScheduleError(TimelyFreezeError, ValueError):
    """A pipeline schedule cannot run, or differs from what really ran. ``grid`` shows it, wrong cells marked."""

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class PlanInputError(TimelyFreezeError, ValueError):
    """The planner's input is wrong; the message names the field."""


class SolverError(TimelyFreezeError, RuntimeError):
    """The solver did not reach an optimum; the message has its status."""


class UnsupportedError(TimelyFreezeError, RuntimeError):
    """Freezing cannot be correct in the way in which the host runs."""


REFUSED = "timely_freeze cannot run here: "
"""How the line of an UnsupportedError about a host begins."""

_WORDS = {
    "Value error, ": "",
    "Input should be a valid dictionary": "is not an object",
    "Input should be a valid boolean": "is not true or false",
    "Input should be": "is not",
}
"""pydantic's messages that are replaced by our own."""


def first_problem(error: ValidationError) -> str:
    """Return the first wrong field, its value and what is allowed, in one line."""
    problem = error.errors(include_url=False)[0]
    first, *inside = [part for part in problem["loc"] if part != "[key]"] or ["it"]
    if problem["loc"][-1:] == ("[key]",):
        inside.pop()
    field = f"{first}{''.join(f'[{part!r}]' for part in inside)}"
    if problem["type"] == "missing":
        return f"{field}: missing"
    text = problem["msg"]
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    text = " ".join(text.split())
    if text.startswith("is not"):
        return f"{field}: {reprlib.repr(problem['input'])} {text}"
    return f"{field}: {text}" if problem["loc"] else text
