"""What this package raises. Every message is one line that names the field, the value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class TimelyFreezeError(Exception):
    """Base of every error that tf_adapters raises on purpose."""


class ConfigError(TimelyFreezeError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class ScheduleError(TimelyFreezeError, ValueError):
    """A pipeline schedule cannot run, or differs from what really ran. ``grid`` shows it, bad cells marked."""

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class PlanInputError(TimelyFreezeError, ValueError):
    """The planner's input is wrong; the message names the field."""


class SolverError(TimelyFreezeError, RuntimeError):
    """The solver did not reach an optimum; the message carries its own status."""


class UnsupportedError(TimelyFreezeError, RuntimeError):
    """The host runs in a way under which freezing cannot be right."""


def first_problem(error: ValidationError) -> str:
    """The first wrong field, its value and what is wrong with it, in one line."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{field} is missing"
    value = repr(problem["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{field or 'it'} is {shown}: {' '.join(problem['msg'].split())}"
