"""Pictures of the accuracy study: accuracy against throughput, what happens over the steps, and sensitivity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.accuracy.cells import BASELINE, METHODS, SENSITIVITY, Cell, Record
from benchmarks.accuracy.figures import Figures, Spread, Summary, by_run, phases_of, relative_times, summarise

COLOURS = dict(zip(METHODS, ("black", "#386bb8", "#0f8f96", "#21875a", "#c8781a", "#b03a48"), strict=True))
MARKERS = dict(zip(METHODS, "*osD^v", strict=True))
VARIANTS = ("#7d55a8", "#c45a9a", "#6f7a30", "#5a6b78")
"""Colours of runs with settings of their own."""
WIDTH, HEIGHT = 4.6, 3.6  # inches of one pair of axes


def draw(records: Sequence[Record], stem: Path) -> list[Path]:
    """Every picture that the records have something for, as STEM_name.png; their paths."""
    found = []
    for name, figure in figures_of(records).items():
        if figure is not None:
            path = stem.with_name(f"{stem.name}_{name}.png")
            figure.savefig(path, format="png")
            found.append(path)
    return found


def figures_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return figures by name; None where the records lack data. Runs that vary one setting give one figure."""
    varied = sensitivity(records)
    if varied is not None:
        return {"by_setting": varied}
    summary = summarise(records)
    return {
        "tradeoff": tradeoff(summary, "accuracy", "held-out accuracy at equal steps"),
        "tradeoff_time": tradeoff(summary, "accuracy_at_time", "held-out accuracy at equal wall-clock"),
        "loss": losses(records),
        "steps": over_steps(records),
        "condition": condition(summary),
    }


def colours_of(groups: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """A colour for each variant: its method's, or one of its own where it has settings."""
    variants = dict.fromkeys(variant for _, _, variant in groups)
    others = [variant for variant in variants if variant not in COLOURS]
    return {**COLOURS, **{variant: VARIANTS[number % len(VARIANTS)] for number, variant in enumerate(others)}}


def grid_of(columns: Sequence[str], rows: Sequence[str], sharey: str = "none") -> tuple[Any, list[list[Any]]]:
    """A figure with axes for each row and column."""
    figure = Figure(figsize=(WIDTH * len(columns), HEIGHT * len(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(len(rows), len(columns), squeeze=False, sharey=sharey).tolist()


def places(groups: Sequence[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """The tasks and the schedules, in the order in which they come."""
    return list(dict.fromkeys(task for task, _, _ in groups)), list(dict.fromkeys(item for _, item, _ in groups))


def panels(groups: Sequence[tuple[str, str, str]]) -> tuple[Any, dict[tuple[str, str], Any]]:
    """A figure with titled axes for each task (columns) and schedule (rows)."""
    tasks, schedules = places(groups)
    figure, axes = grid_of(tasks, schedules)
    by_place = {}
    for row, schedule in zip(axes, schedules, strict=True):
        for panel, task in zip(row, tasks, strict=True):
            panel.set_title(f"{task}, {schedule}", fontsize=10)
            by_place[task, schedule] = panel
    return figure, by_place


def explain(figure: Any, axes: Iterable[Any]) -> None:
    """One legend for all axes, beside them."""
    found: dict[str, Any] = {}
    for panel in axes:
        found.update(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside right center", fontsize=8, frameon=False)


def tradeoff(summary: Summary, figure_name: str, label: str) -> Any:
    """Accuracy against throughput, mean and spread over seeds; the dashed line is the baseline's accuracy."""
    figure, axes = panels(list(summary))
    colours = colours_of(summary)
    for (task, schedule, variant), found in summary.items():
        panel, value = axes[task, schedule], found[figure_name]
        panel.set_xlabel("throughput / baseline's")
        panel.set_ylabel(label)
        if value is None:
            continue
        throughput = found["throughput"] or Spread(1.0, 0.0, 1)
        method = variant.split()[0]
        if method == BASELINE:
            panel.axhline(value.mean, color="0.7", linewidth=0.8, linestyle="--", zorder=0)
        panel.errorbar(
            throughput.mean, value.mean, xerr=throughput.deviation, yerr=value.deviation, fmt=MARKERS[method],
            color=colours[variant], capsize=2, label=label_of(variant),
        )  # fmt: skip
    explain(figure, axes.values())
    return figure


def losses(records: Sequence[Record]) -> Any:
    """Held-out loss of the first seed over time in baseline steps, as far as the baseline goes."""
    cells = [Cell.of(record) for record in records]
    figure, axes = panels([cell.group for cell in cells])
    colours = colours_of(cell.group for cell in cells)
    for cell, record in zip(cells, records, strict=True):
        if cell.seed:
            continue
        at, loss, _ = zip(*record["curve"], strict=True)
        relative = relative_times(phases_of(record), record["pairs"])
        times = [sum(relative[: int(step)]) for step in at]
        panel = axes[cell.task, cell.schedule]
        panel.plot(times, loss, color=colours[cell.variant], label=label_of(cell.variant), linewidth=1.2)
        panel.set_xlim(0, record["task"]["steps"])
        panel.set_yscale("log")
        panel.set_xlabel("wall-clock time, in baseline steps")
        panel.set_ylabel("held-out loss, nats (seed 0)")
    explain(figure, axes.values())
    return figure


_SMOOTHED = 20
"""Steps that a point of ``over_steps`` is a mean of: monitoring freezes in every second step, APF in periods."""


def over_steps(records: Sequence[Record]) -> Any:
    """Freeze ratio of the first seed, means of twenty steps. Throughput is in the trade-off pictures."""
    chosen = [(Cell.of(record), record) for record in records if record["cell"]["seed"] == 0]
    chosen = [(cell, record) for cell, record in chosen if cell.method != BASELINE]
    if not chosen:
        return None
    groups = [cell.group for cell, _ in chosen]
    figure, axes = panels(groups)
    colours = colours_of(groups)
    for cell, record in chosen:
        shares = zip(*(stage["frozen_share"] for stage in record["stages"]), strict=True)
        ratios = [sum(of_stages) / len(of_stages) for of_stages in shares][: record["task"]["steps"]]
        starts = range(0, len(ratios) - _SMOOTHED + 1, _SMOOTHED)
        means = [sum(ratios[start : start + _SMOOTHED]) / _SMOOTHED for start in starts]
        panel = axes[cell.task, cell.schedule]
        middles = [start + _SMOOTHED / 2 for start in starts]
        panel.plot(middles, means, color=colours[cell.variant], label=cell.variant, lw=1.2)
        panel.set(xlabel="step", ylabel="freeze ratio, mean of 20 steps", ylim=(0, 1))
    explain(figure, axes.values())
    return figure


def condition(summary: Summary) -> Any:
    """kappa against p_eff: above the diagonal the paper's analysis promises less time to the same loss.

    Open markers are p_eff of batches, whose noise counts as gradient.
    """
    known = {group: found for group, found in summary.items() if found["kappa"] and found["p_eff"]}
    if not known:
        return None
    figure, axes = panels(list(known))
    colours = colours_of(known)
    for (task, schedule, variant), found in known.items():
        kappa, p_eff, panel = found["kappa"], found["p_eff"], axes[task, schedule]
        assert kappa is not None
        assert p_eff is not None
        method = variant.split()[0]
        panel.errorbar(
            kappa.mean, p_eff.mean, xerr=kappa.deviation, yerr=p_eff.deviation, fmt=MARKERS[method],
            color=colours[variant], capsize=2, label=variant,
        )  # fmt: skip
        batches = found["p_eff_batches"]
        if batches is not None:
            panel.plot(kappa.mean, batches.mean, MARKERS[method], color=colours[variant], fillstyle="none")
    for panel in axes.values():
        line = {"color": "0.6", "linewidth": 0.8, "linestyle": "--", "label": "kappa = p_eff (below: no gain)"}
        panel.plot([0.4, 1.1], [0.4, 1.1], **line, zorder=0)
        panel.plot(
            [], [], "o", color="0.3", fillstyle="none", label="hollow: p_eff of batches,\nnoise counted as gradient"
        )
        panel.set(xlabel="kappa (step time / baseline's)", ylabel="p_eff")
    explain(figure, axes.values())
    return figure


def sensitivity(records: Sequence[Record]) -> Any:
    """Accuracy and throughput against r_max, T_APF and P_Auto (paper: sensitivity), mean and spread over seeds."""
    runs = by_run(records)
    known = [(title, name) for title, (name, _, _) in SENSITIVITY.items() if any(name in c.settings for c, _ in runs)]
    if not known:
        return None
    figure, axes = grid_of([title for title, _ in known], ["accuracy", "throughput"], sharey="row")
    baseline = Spread.of(run.accuracy for cell, run in runs if cell.method == BASELINE)
    for column, (title, name) in enumerate(known):
        for row, figure_name in enumerate(("accuracy", "throughput")):
            panel = axes[row][column]
            for method, points in by_value(runs, name, figure_name).items():
                values = sorted(points)
                means, bars = [points[v].mean for v in values], [points[v].deviation for v in values]
                panel.errorbar(
                    values, means, yerr=bars, label=method, color=COLOURS[method], marker=MARKERS[method], capsize=2
                )
            level = (baseline.mean if baseline else None) if row == 0 else 1.0
            if level is not None:
                panel.axhline(level, color="0.7", linewidth=0.8, linestyle="--", zorder=0, label=label_of(BASELINE))
            panel.set(xlabel=title, ylabel="held-out accuracy" if row == 0 else "throughput / baseline's")
            panel.set_xscale("log" if title == "T_APF" else "linear")
    explain(figure, [panel for row in axes for panel in row])
    return figure


def by_value(runs: Sequence[tuple[Cell, Figures]], name: str, figure_name: str) -> Mapping[str, dict[float, Spread]]:
    """By method, and by the value of the setting ``name``: a figure's mean and spread."""
    found: dict[str, dict[float, list[float | None]]] = {}
    for cell, run in runs:
        if name in cell.settings:
            of_method = found.setdefault(cell.method, {})
            of_method.setdefault(cell.settings[name], []).append(getattr(run, figure_name))
    spreads = {m: {v: Spread.of(of_value) for v, of_value in values.items()} for m, values in found.items()}
    return {m: {v: spread for v, spread in values.items() if spread} for m, values in spreads.items()}


def label_of(variant: str) -> str:
    """A method, with its settings if it has any, as legends name it."""
    return "no freezing" if variant.split()[0] == BASELINE else variant
