"""Tables and picture of the language model study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.language_model.tasks import TASKS
from benchmarks.language_model.ways import (
    BASE,
    EXACT,
    EXACT_FEWER,
    EXACT_MORE,
    FEWER_5,
    FEWER_6,
    GOAL_EXACT,
    GOAL_PAPER,
    GOAL_PAYS,
    LARGER_RATE,
    PAYS_MORE,
    RETIRED,
    WAYS,
)
from benchmarks.shared.files import markdown_table

Run = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, Mapping[int, Run]]]
"""By task, way and seed."""

WALL_CLOCK, STEPS = "loss", "loss_at_equal_steps"


class Contrast(NamedTuple):
    """``better`` against ``worse``, by the loss at equal wall-clock or at equal steps."""

    claim: str
    better: str
    worse: str
    measure: str = WALL_CLOCK


_CONTRASTS = (
    Contrast("spread masks against independent ones, equal steps", "tensors", "tensors, independent masks", STEPS),
    Contrast("the same, the most", "tensors, the most", "tensors, independent masks, the most", STEPS),
    Contrast("the same, deferred", "deferred, tensors", "deferred, tensors, independent masks", STEPS),
    Contrast("computed mean against skipped as zero", "tensors, computed mean", "tensors"),
    Contrast("the same, deferred", "deferred, tensors, computed mean", "deferred, tensors"),
    Contrast("tokens against tensors, both 1.25x", "tokens", "tensors"),
    Contrast("the same, both 1.16x", "tokens at 1.16x", "tensors at 1.16x"),
    Contrast("the same, deferred, both 1.36x", "deferred, tokens", "deferred, tensors"),
    Contrast("tokens by norm against drawn evenly", "tokens", "tokens drawn evenly"),
    Contrast("the same, deferred", "deferred, tokens", "deferred, tokens drawn evenly"),
    Contrast("tokens against 6 microbatches (1.22x)", "tokens", FEWER_6),
    Contrast("deferral alone (1.23x) against 6 microbatches", EXACT, FEWER_6),
    Contrast("deferral and tokens against 5 microbatches (1.38x)", "deferred, tokens", FEWER_5),
    Contrast("deferral and tokens against deferral alone", "deferred, tokens", EXACT),
    Contrast("deferral and 6 microbatches against deferral and tokens", "deferred, 6 microbatches", "deferred, tokens"),
    Contrast(f"{GOAL_EXACT} against 6 microbatches", GOAL_EXACT, FEWER_6),
    Contrast(f"{GOAL_PAYS}, retired, against {GOAL_EXACT}", GOAL_PAYS, GOAL_EXACT),
    Contrast(f"{EXACT_MORE}, against 6 microbatches", EXACT_MORE, FEWER_6),
    Contrast("the same, against the host's memory", EXACT_MORE, GOAL_EXACT),
    Contrast(f"{PAYS_MORE}, retired, against exact", PAYS_MORE, EXACT_MORE),
    Contrast(f"{EXACT_FEWER}, against {GOAL_PAYS}, retired", EXACT_FEWER, GOAL_PAYS),
    Contrast(f"{EXACT_MORE}, with 6 microbatches against 8", EXACT_FEWER, EXACT_MORE),
)


def by_task(rows: Iterable[Run]) -> Runs:
    """Sort the trainings. Those with one of the levers that were taken out are left out."""
    runs: dict[str, dict[str, dict[int, Run]]] = {task: {way: {} for way in (*WAYS, *RETIRED)} for task in TASKS}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["way"] in WAYS or row["way"] in RETIRED:
            runs[row["task"]][row["way"]][row["seed"]] = row
    return {task: {way: of for way, of in ways.items() if of} for task, ways in runs.items() if any(ways.values())}


def gains(runs: Runs, measure: str, of: Iterable[str] = (*WAYS, *RETIRED)) -> str:
    """Return the table of ways and tasks: loss without freezing minus loss of the way."""
    lines = []
    for way in of:
        of_tasks = [ways.get(way, {}) for ways in runs.values()]
        every = [run for of_task in of_tasks for run in of_task.values()]
        if not every:
            continue
        speed, ratio = (_span(float(run[key]) for run in every) for key in ("speedup", "mean_freeze_ratio"))
        cells = [_loss(ways, measure) if way == BASE else _against(ways, way, BASE, measure) for ways in runs.values()]
        lines.append([f"{way}, retired" if way in RETIRED else way, f"{speed}x", ratio, *cells])
    return markdown_table(["", "step, planned", "mean freeze ratio", *runs], lines)


def contrasts(runs: Runs) -> str:
    """Return the table of paired differences between two ways, in each task."""
    lines = []
    for claim, better, worse, measure in _CONTRASTS:
        cells = [_against(ways, better, worse, measure) for ways in runs.values()]
        if any(cells):
            lines.append([claim, *cells])
    return markdown_table(["lower loss by", *runs], lines)


def _loss(ways: Mapping[str, Mapping[int, Run]], measure: str) -> str:
    return f"loss {statistics.fmean(float(run[measure]) for run in ways[BASE].values()):.3f}" if BASE in ways else ""


def _against(ways: Mapping[str, Mapping[int, Run]], better: str, worse: str, measure: str) -> str:
    """The mean of the paired differences and its standard error; empty where no seed has both."""
    ours, others = ways.get(better, {}), ways.get(worse, {})
    paired = [float(others[seed][measure] - run[measure]) for seed, run in ours.items() if seed in others]
    if not paired:
        return ""
    if len(paired) == 1:
        return f"{paired[0]:+.3f}, one seed"
    error = statistics.stdev(paired) / math.sqrt(len(paired))
    return f"{statistics.fmean(paired):+.3f} ± {error:.3f} ({len(paired)})"


def _span(values: Iterable[float]) -> str:
    ordered = sorted(f"{value:.2f}" for value in values)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


_BOLD = {
    BASE: "black",
    LARGER_RATE: "tab:brown",
    FEWER_6: "tab:orange",
    GOAL_PAPER: "tab:red",
    GOAL_EXACT: "tab:cyan",
    GOAL_PAYS: "tab:blue",
    EXACT_MORE: "tab:green",
    EXACT_FEWER: "tab:purple",
}


def draw(runs: Runs, path: Path) -> None:
    """Held-out loss over wall-clock, means over seeds: a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, every = plt.subplots(1, len(runs), figsize=(5.5 * len(runs), 5.5), layout="constrained", squeeze=False)
    for axes, (task, ways) in zip(every[0], runs.items(), strict=True):
        # Means over the same seeds, those of every line in colour.
        seeds = set[int].intersection(*(set(of_way) for way, of_way in ways.items() if way in _BOLD))
        for way, of_way in ways.items():
            if not seeds <= set(of_way):
                continue
            times, means = _mean_curve([of_way[seed]["curve"] for seed in seeds])
            late = [(time, mean) for time, mean in zip(times, means, strict=True) if time >= 0.5]
            color = _BOLD.get(way)
            style = {"color": color, "linewidth": 2.2, "zorder": 3} if color else {"color": "0.75", "linewidth": 0.9}
            axes.plot(*zip(*late, strict=True), label=way if color else None, **style)
        count = len(seeds)
        axes.set(title=f"{task} ({count} seed{'s' * (count > 1)})", xlabel="wall-clock, share of the whole (planned)")
        axes.grid(alpha=0.3)
    every[0][0].set_ylabel("held-out loss")
    _legend(figure, every[0], columns=min(4, 2 * len(runs)))
    figure.savefig(path, dpi=110)


def _legend(figure: Any, every: Sequence[Any], columns: int) -> None:
    """One for all panels."""
    named = {label: line for axes in every for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [label for label in _BOLD if label in named]
    figure.legend([named[label] for label in labels], labels, loc="outside lower center", ncols=columns)


_Curve = Sequence[tuple[float, float]]


def _mean_curve(curves: Sequence[_Curve]) -> tuple[list[float], list[float]]:
    mean: Callable[[int], float] = lambda index: statistics.fmean(curve[index][1] for curve in curves)  # noqa: E731
    return [time for time, _ in curves[0]], [mean(index) for index in range(len(curves[0]))]
