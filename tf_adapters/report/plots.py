"""Pictures of one run, drawn from its report: backward times, freeze ratios, the time of each rank.

Only drawing imports matplotlib. A picture is left out if the report lacks its data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import correlation, linear_regression, pvariance
from typing import Any, NamedTuple

import numpy as np

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.batch_times import RankTimes
from tf_adapters.measuring.estimates import grouped
from tf_adapters.report.batch import batch_of
from tf_adapters.report.colours import BASE, Rgb
from tf_adapters.report.gantt_marks import matplotlib_module
from tf_adapters.report.schema import Report
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.training.phases import PhaseSchedule

Points = Sequence[tuple[float, float]]
Draw = Callable[[Any, Report], None]

_BINS = 20
_WHOLE = 0.999  # a freeze ratio above it leaves no weight gradient
_LEAST_SPREAD = 1e-6  # of freeze ratios, below which no line can be fitted
_STAGE_COLOURS = ("#386bb8", "#c8781a", "#21875a", "#8a4fb0", "#b03a48", "#0f8f96", "#7a6a3a", "#555555")
_WIDTH, _HEIGHT = 5.2, 3.8  # inches of one stage's axes

Part = tuple[str, Rgb, list[float]]
"""A label, a colour, and ms by rank."""

_TRANSFER, _OVERHEAD, _WAITING = (0.70, 0.23, 0.28), (0.85, 0.60, 0.62), (0.87, 0.87, 0.87)


class FittedLine(NamedTuple):
    """``intercept`` + ``slope`` * x by least squares, and the share ``r2`` of the variance that it explains."""

    intercept: float
    slope: float
    r2: float


def fitted(points: Points) -> FittedLine | None:
    """The line through (x, y); None where all x are the same, or nearly."""
    if not points:
        return None
    x, y = zip(*points, strict=True)
    if len(x) * pvariance(x) <= _LEAST_SPREAD:
        return None
    slope, intercept = linear_regression(x, y)
    return FittedLine(intercept, slope, correlation(x, y) ** 2 if pvariance(y) > 0.0 else 1.0)


def backward_points(report: Report) -> dict[int, list[tuple[float, float]]]:
    """By stage: (actual freeze ratio in [0, 1], ms) of its backwards, a median for each action and phase."""
    samples = report.measured.backward_ms
    return dict(sorted(grouped((Action.parse(of.action).stage, (of.afr, of.ms)) for of in samples).items()))


def on_the_line(stage: int, points: Points) -> list[tuple[float, float]]:
    """Return the points to fit a line to. They leave out the backwards of stage 0 that were frozen whole: none ran."""
    return [(afr, ms) for afr, ms in points if stage or afr < _WHOLE]


def planned_ratio_by_step(report: Report) -> dict[str, list[float]]:
    """By stage: the plan's mean freeze ratio times the ramp in steps 1, 2, ..., in [0, 1] (paper section 3.3).

    Monitoring, whose masks the plan does not know, counts as nothing frozen; progressive freezing is taken to start at
    its end. Empty without a plan.
    """
    warmup, monitoring, progressive = (end for _, end in report.phases.named())
    if report.plan is None or warmup is None or monitoring is None or progressive is None:
        return {}
    phases = PhaseSchedule(warmup, monitoring, progressive)
    steps = range(1, report.step + 1)
    ratios = report.plan.stage_freeze_ratio.items()
    return {str(stage): [ratio * phases.ramp(step) for step in steps] for stage, ratio in ratios}


def plots_of(report: Report) -> dict[str, Draw]:
    """The pictures that the report has data for: the function that draws each, by the name of its file."""
    figures: dict[str, Draw] = {}
    if any(fitted(on_the_line(*of_stage)) for of_stage in backward_points(report).items()):
        figures["backward_time"] = _draw_backward_time
    if any(map(any, [*report.frozen_share.values(), *planned_ratio_by_step(report).values()])):
        figures["freeze_ratio"] = _draw_freeze_ratio
    if any(report.parameter_freeze_ratio.values()):
        figures["parameters"] = _draw_parameters
    if batch_of(report) is not None:
        figures["rank_times"] = _draw_rank_times
    return figures


def draw_plots(report: Report, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Draw all of ``plots_of(report)`` as PNG files into ``folder``, which is made; their paths.

    Raises UnsupportedError without matplotlib, ConfigError where there is nothing to draw or no place for it.
    """
    plots = plots_of(report)
    if not plots:
        raise ConfigError("the report has nothing to plot yet: pictures come with the plan")
    if "\0" in os.fspath(folder):
        raise ConfigError(f"--plots: {folder!r} is not a folder's name")
    agg, figures = matplotlib_module("backends.backend_agg"), matplotlib_module("figure")
    paths = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, draw in plots.items():
            figure = figures.Figure(dpi=120, facecolor="white", layout="constrained")
            agg.FigureCanvasAgg(figure)  # a canvas of its own: pyplot and its backend stay as they are
            draw(figure, report)
            paths.append(Path(folder) / f"{name}.png")
            figure.savefig(paths[-1], format="png")
    except OSError as error:
        raise ConfigError(f"--plots: cannot write into {folder}: {error.strerror or error}") from None
    return tuple(paths)


# --- the pictures --------------------------------------------------------------------------------------------


def _draw_backward_time(figure: Any, report: Report) -> None:
    """Draw each stage's backward times against AFR, and the line fitted to ``on_the_line`` (as in the paper)."""
    points = backward_points(report)
    for (stage, of_stage), axes in zip(points.items(), _axes(figure, len(points)), strict=True):
        axes.scatter(*zip(*of_stage, strict=True), s=14, alpha=0.7, color=_colour(stage), linewidths=0)
        line = fitted(on_the_line(stage, of_stage))
        title = f"stage {stage}"
        if line is not None:
            axes.plot([0, 1], [line.intercept, line.intercept + line.slope], color="black", linewidth=1)
            title += f": {line.intercept:.3g} ms {line.slope:+.3g} ms x AFR, R² {line.r2:.3f}"
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="actual freeze ratio (AFR)", ylabel="backward, ms", xlim=(-0.03, 1.03), ylim=(0, None))


def _draw_freeze_ratio(figure: Any, report: Report) -> None:
    """Draw the share that each stage's masks froze step by step, the plan's ratio, and the ends of the phases."""
    figure.set_size_inches(7.5, _HEIGHT)
    axes = figure.add_subplot()
    planned = planned_ratio_by_step(report)
    for stage, ratios in planned.items():
        label = f"stage {stage}, planned"
        axes.plot(range(1, len(ratios) + 1), ratios, label=label, color=_colour(int(stage)), linewidth=0.8)
    for stage, shares in report.frozen_share.items():
        steps, label = range(1, len(shares) + 1), f"stage {stage}, frozen by its masks"
        axes.scatter(steps, shares, s=6, label=label, color=_colour(int(stage)), linewidths=0)
    axes.set_title("share of each stage's weight gradients skipped, mean over microbatches", fontsize=9)
    for name, end in report.phases.named():
        if end is not None and 0 < end <= report.step:
            axes.axvline(end, color="0.6", linewidth=0.8, linestyle=":")
            axes.annotate(f"{name} ends", (end, 1.0), (2, -2), textcoords="offset points", rotation=90,
                          va="top", fontsize=7, color="0.4")  # fmt: skip
    axes.set(xlabel="step", ylabel="freeze ratio", ylim=(0, 1.02))
    axes.legend(fontsize=8)


def _draw_parameters(figure: Any, report: Report) -> None:
    """Draw for each stage a histogram of its tensors' freeze ratios (as in the paper)."""
    by_stage = report.parameter_freeze_ratio
    edges = [number / _BINS for number in range(_BINS + 1)]
    for (stage, ratios), axes in zip(by_stage.items(), _axes(figure, len(by_stage)), strict=True):
        axes.hist(list(ratios.values()), bins=edges, color=_colour(int(stage)), edgecolor="white", linewidth=0.5)
        mean = math.fsum(ratios.values()) / len(ratios) if ratios else 0.0
        axes.axvline(mean, color="black", linewidth=1, linestyle="--")
        axes.set_title(f"stage {stage}: {len(ratios)} tensors, mean {mean:.2f}", fontsize=9)
        axes.set(xlabel="share of microbatches in which a tensor is frozen", ylabel="tensors", xlim=(0, 1))


def _draw_rank_times(figure: Any, report: Report) -> None:
    """Draw each rank's time as a bar. The time that freezing saves of a backward counts as its weight gradient's."""
    batch = batch_of(report)
    assert batch is not None
    ranks = range(len(batch.ranks))
    figure.set_size_inches(7.5, 1.6 + 0.35 * len(batch.ranks))
    axes = figure.add_subplot()
    left = [0.0] * len(batch.ranks)
    for label, colour, values in rank_parts(report, batch.ranks):
        if any(value >= 0.002 * batch.span_ms for value in values):
            axes.barh(ranks, values, left=left, color=colour, label=label, height=0.7)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    for rank, bubble in enumerate(batch.bubbles):
        axes.annotate(f" {bubble:.0%}", (batch.span_ms, rank), va="center", fontsize=8)
    what = "with nothing frozen" if report.freezes else "in the host's order"
    axes.set_title(f"a rank's batch of {batch.span_ms:,.1f} ms {what}; right: its bubble", fontsize=9)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set(xlabel="ms", xlim=(0, 1.08 * batch.span_ms))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def rank_parts(report: Report, ranks: Sequence[RankTimes]) -> list[Part]:
    """Return the parts of the bars, from the left. Those of a rank add up to the batch."""
    shares = _input_shares(report, len(ranks))
    compute = {kind: np.array([rank.compute_ms.get(kind.value, 0.0) for rank in ranks]) for kind in Kind}
    # Where freezing was not measured a backward stays in one piece.
    split = np.array([0.0 if share is None else 1.0 for share in shares]) * compute[Kind.BACKWARD]
    inputs = np.array([share or 0.0 for share in shares]) * split
    compute[Kind.BACKWARD] -= split
    compute[Kind.INPUT_GRAD] += inputs
    compute[Kind.WEIGHT_GRAD] += split - inputs
    names = ("forward", "backward", "input gradient", "weight gradient")
    return [
        *((name, BASE[kind], compute[kind].tolist()) for name, kind in zip(names, Kind, strict=True)),
        ("transfers", _TRANSFER, [rank.transfer_ms for rank in ranks]),
        ("overhead, late receives", _OVERHEAD, [rank.overhead_ms for rank in ranks]),
        ("waiting for other ranks", _WAITING, [rank.waiting_ms for rank in ranks]),
    ]


def _input_shares(report: Report, ranks: int) -> list[float | None]:
    """The share of each rank's whole backwards that is left with everything frozen; None if freezing saves nothing."""
    schedule = report.schedule
    shares: list[float | None] = []
    for row in schedule.ranks[:ranks]:
        pairs = [report.times[str(a)] for a in row if a.kind is Kind.BACKWARD and str(a) in report.times]
        least, most = (sum(pair[which] for pair in pairs) for which in (0, 1))
        shares.append(least / most if 0.0 <= least < most else None)
    return shares + [None] * (ranks - len(shares))


def _axes(figure: Any, count: int) -> Sequence[Any]:
    """Axes for each of ``count`` stages, at most four in a row."""
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure.set_size_inches(_WIDTH * columns, _HEIGHT * rows)
    return [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _colour(stage: int) -> str:
    return _STAGE_COLOURS[stage % len(_STAGE_COLOURS)]
