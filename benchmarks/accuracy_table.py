"""The table of the accuracy study, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accuracy_cells import Record
from accuracy_figures import Spread, summarise

Shown = Callable[[float], str]


def percent(value: float) -> str:
    return f"{value:.1%}"


def plain(value: float) -> str:
    return f"{value:.3f}"


COLUMNS: tuple[tuple[str, str, Shown], ...] = (
    ("accuracy", "accuracy", percent),
    ("loss", "loss", plain),
    ("acc. equal time", "accuracy_at_time", percent),
    ("loss equal time", "loss_at_time", plain),
    ("throughput", "throughput", plain),
    ("freeze ratio", "freeze_ratio", plain),
    ("time to loss", "time_to_loss", plain),
    ("steps to loss", "steps_to_loss", plain),
    ("kappa", "kappa", plain),
    ("p_eff", "p_eff", plain),
    ("p_eff of batches", "p_eff_batches", plain),
    ("kappa run", "kappa_run", plain),
    ("p_eff run", "p_eff_run", plain),
    ("kappa<p_eff", "kappa_below_p_eff", plain),
)
"""Heading, figure (see ``Figures``), and how it is written."""


def table(records: Sequence[Record]) -> str:
    """A row for each task, schedule and variant: mean +- standard deviation over seeds, (n) where some have none."""
    summary = summarise(records)
    rows = [["task", "schedule", "method", "seeds", *(heading for heading, _, _ in COLUMNS)]]
    for (task, schedule, variant), found in summary.items():
        accuracy = found["accuracy"]
        assert accuracy is not None
        cells = [written(found[name], shown, accuracy.count) for _, name, shown in COLUMNS]
        rows.append([task, schedule, variant, str(accuracy.count), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def written(spread: Spread | None, shown: Shown, runs: int) -> str:
    """One cell; where some of the ``runs`` have no value, how many have one."""
    if spread is None:
        return "-"
    text = shown(spread.mean) + (f" +- {shown(spread.deviation)}" if spread.count > 1 else "")
    return text if spread.count == runs else f"{text} ({spread.count})"
