"""The tables of the accuracy study, as text: all figures, and what they decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.accuracy.cells import METHODS, SCHEDULES, Record
from benchmarks.accuracy.figures import Spread, summarise
from benchmarks.accuracy.verdicts import HELD_OUT, Verdict, verdicts
from benchmarks.shared.files import markdown_table

Shown = Callable[[float], str]


def percent(value: float) -> str:
    return f"{value:.1%}"


def plain(value: float) -> str:
    return f"{value:.3f}"


COLUMNS: tuple[tuple[str, str, Shown], ...] = (
    ("accuracy", "accuracy", percent),
    ("loss", "loss", plain),
    ("lowest loss", "lowest_loss", plain),
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
    return _aligned(rows)


def verdict_table(records: Sequence[Record]) -> str:
    """A row for each variant that freezes, next to no freezing: held-out metrics at equal steps, and who beats it."""
    headings = [f"{metric} {heading}" for metric in HELD_OUT for heading in ("off none", "spread of none", "within")]
    rows = [["task", "schedule", "method", *headings, "throughput", "beaten by"]]
    for group, verdict in verdicts(records).items():
        judged = [cell for metric in HELD_OUT for cell in _judged(verdict, metric)]
        rows.append([*group, *judged, plain(verdict.throughput), ", ".join(verdict.beaten_by) or "-"])
    return _aligned(rows)


def _judged(verdict: Verdict, metric: str) -> tuple[str, str, str]:
    within = {True: "yes", False: "no", None: "-"}[verdict.within(metric)]
    off, alone = verdict.off[metric], verdict.alone[metric]
    if alone.count < 2:
        return f"{off.mean:+.4f}", "-", within
    return f"{off.mean:+.4f} +- {off.deviation:.4f}", f"{alone.deviation:.4f}", within


def markdown(records: Sequence[Record]) -> str:
    """The figures that docs/accuracy.md shows, a row for each task, schedule and variant but those with settings."""
    judged = verdicts(records)
    titles = [
        "task", "schedule", "method", "accuracy, equal steps", "off `none`", "equal wall-clock", "loss, equal steps",
        "off `none`", "throughput", "freeze ratio", "kappa", "p_eff",
    ]  # fmt: skip
    rows = []
    groups = {group: found for group, found in summarise(records).items() if group[2] in METHODS}
    tasks = list(dict.fromkeys(task for task, _, _ in groups))
    order = {group: (tasks.index(group[0]), SCHEDULES.index(group[1]), METHODS.index(group[2])) for group in groups}
    for (task, schedule, variant), of_group in sorted(groups.items(), key=lambda item: order[item[0]]):
        verdict = judged.get((task, schedule, variant))
        off = verdict.off if verdict else dict.fromkeys(HELD_OUT)
        rows.append(
            [
                task,
                schedule,
                f"`{variant}`",
                _short(of_group["accuracy"], ".1%"),
                _short(off["accuracy"], "+.1f", scale=100),
                _short(of_group["accuracy_at_time"], ".1%"),
                _short(of_group["loss"], ".3f"),
                _short(off["loss"], "+.3f"),
                _short(of_group["throughput"], ".2f", unit="x"),
                *(_short(of_group[name], ".2f") for name in ("freeze_ratio", "kappa", "p_eff")),
            ]
        )
    return markdown_table(titles, rows)


def _short(spread: Spread | None, form: str, unit: str = "", scale: float = 1.0) -> str:
    """Mean and deviation of a figure; a percentage's deviation is in points."""
    if spread is None:
        return "-"
    of_deviation = form.lstrip("+").replace("%", "f")
    deviation = spread.deviation * (100 if form.endswith("%") else scale)
    return f"{spread.mean * scale:{form}}{unit} ± {deviation:{of_deviation}}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def written(spread: Spread | None, shown: Shown, runs: int) -> str:
    """One cell; where some of the ``runs`` have no value, how many have one."""
    if spread is None:
        return "-"
    text = shown(spread.mean) + (f" +- {shown(spread.deviation)}" if spread.count > 1 else "")
    return text if spread.count == runs else f"{text} ({spread.count})"
