"""What each lever would bring, as a table on the page of a run that only measures."""

from __future__ import annotations

from tf_adapters.report.page import Table
from tf_adapters.simulate.levers import Lever, Levers

__all__ = ["levers_table"]

_HEADER = ("", "step ms, planned", "speedup", "microbatches held", "weight gradients")


def levers_table(found: Levers) -> Table:
    """A line for the step as it is, then one for each lever, in the order of what they cost."""
    rows = [_row(found, found.now), *(_row(found, lever) for lever in found.others)]
    return Table("What each would bring, planned from the times of this run", _HEADER, tuple(rows))


def _row(found: Levers, lever: Lever) -> tuple[str, ...]:
    held = f"{lever.held:.1f}".removesuffix(".0")
    step, speedup = f"{lever.step_ms:,.1f}", f"{found.speedup(lever):.2f}x"
    return (lever.name, step, speedup, held, lever.gradients)
