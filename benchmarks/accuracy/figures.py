"""Figures of the accuracy study, computed from the records of its runs without torch.

Wall-clock time is counted in baseline steps: a step of a run lasts (its time / its twin's time in the same moment)
of them. So what else the machine did while a run went on does not count. ``p_eff`` and ``kappa`` are the paper's
(section "Time-to-Accuracy Trade-off" and its appendix on convergence).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from benchmarks.accuracy.cells import BASELINE, Cell, Record

NEAREST = 5  # pairs that tell a step's relative time

Pair = Sequence[float]
"""A step's number, then ms of the host alone and of freezing."""


@dataclass(frozen=True)
class Figures:
    """One run. None: not measured, or not reached. Ratios of times are to the baseline of the same seed.

    Attributes:
        accuracy, loss: held out, after the task's steps.
        lowest_loss: held out, the lowest of all evaluations up to the task's last step: what early stopping keeps.
        accuracy_at_time, loss_at_time: held out, when the baseline's time for these steps is over.
        kappa: step time of stable freezing over the host's alone (the paper's kappa), median over pairs.
        p_eff: the paper's average effective update probability, over the same steps; [0, 1] but for noise.
        p_eff_batches: the same of batches' gradients, whose noise counts as gradient.
        kappa_run, p_eff_run: the same over all of the task's steps, monitoring included.
        planned_kappa: the step ratio that the plan promised.
        freeze_ratio: mean share of elements frozen in stable freezing, over stages and microbatches, in [0, 1].
        time_to_loss: until the held-out loss is the baseline's last one, over the baseline's own time until then.
        steps_to_loss: the same in steps.
        step_ms_alone: median step of the host alone; ms.
    """

    accuracy: float
    loss: float
    lowest_loss: float
    accuracy_at_time: float | None = None
    loss_at_time: float | None = None
    kappa: float | None = None
    p_eff: float | None = None
    p_eff_batches: float | None = None
    kappa_run: float | None = None
    p_eff_run: float | None = None
    planned_kappa: float | None = None
    freeze_ratio: float | None = None
    time_to_loss: float | None = None
    steps_to_loss: float | None = None
    step_ms_alone: float | None = None

    @property
    def kappa_below_p_eff(self) -> float | None:
        """1 where the paper's condition for a gain, kappa < p_eff, held, else 0; a mean of it is a share of runs."""
        return None if self.kappa is None or self.p_eff is None else float(self.kappa < self.p_eff)

    @property
    def throughput(self) -> float | None:
        """Throughput in stable freezing divided by the baseline's."""
        return None if self.kappa is None else 1 / self.kappa


# --- time ----------------------------------------------------------------------------------------------------


def relative_times(phases: Sequence[str], pairs: Sequence[Pair]) -> list[float]:
    """For each step, how long it takes over a baseline step: the median of the nearest pairs in the same phase."""
    by_phase: dict[str, list[tuple[float, float]]] = {}
    for number, alone, freezing in pairs:
        by_phase.setdefault(phases[int(number) - 1], []).append((number, freezing / alone))
    every = [pair for of_phase in by_phase.values() for pair in of_phase]

    def at(step: int, phase: str) -> float:
        near = sorted(by_phase.get(phase) or every, key=lambda pair: abs(pair[0] - step))[:NEAREST]
        return statistics.median(ratio for _, ratio in near) if near else 1.0

    return [at(step, phase) for step, phase in enumerate(phases, start=1)]


def clock(phases: Sequence[str], pairs: Sequence[Pair]) -> list[float]:
    """The time at the end of each step, in baseline steps; it begins with 0 before the first."""
    return [0.0, *accumulate(relative_times(phases, pairs))]


def interpolate(at: float, xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The value at ``at`` on the line through points with rising ``xs``; None beyond the last of them."""
    if not xs or at > xs[-1] + 1e-9:
        return None
    right = min(bisect_left(xs, at), len(xs) - 1)
    if right == 0:
        return ys[0]
    share = min(1.0, (at - xs[right - 1]) / (xs[right] - xs[right - 1]))
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def first_time_at(level: float, times: Sequence[float], losses: Sequence[float]) -> float | None:
    """When the loss, on the line through its points, is at ``level`` or below for the first time; None: never."""
    for index, loss in enumerate(losses):
        if loss > level:
            continue
        if index == 0:
            return times[0]
        before = losses[index - 1]
        return times[index - 1] + (before - level) / (before - loss) * (times[index] - times[index - 1])
    return None


# --- one run -------------------------------------------------------------------------------------------------


def phases_of(record: Record) -> list[str]:
    """The phase of each step."""
    changes = [(first, phase) for first, phase in record["phases"]] + [(record["steps"] + 1, "")]
    return [phase for (first, phase), (following, _) in pairwise(changes) for _ in range(first, following)]


def p_eff(record: Record, after: int = 0, until: float = float("inf"), of_batches: bool = False) -> float | None:
    """sum_t sum_j p_j (d_j F)^2 / sum_t |grad F|^2 over probed steps after ``after`` up to ``until``; all stages.

    The estimate is unbiased above and below the line, so noise can take it out of [0, 1]. ``of_batches`` takes the
    gradients of batches instead, noise and all.
    """
    probes = [probe[1:] for stage in record["stages"] for probe in stage["probes"] if after < probe[0] <= until]
    updated, whole = (sum(probe[index + 2 * of_batches] for probe in probes) for index in (0, 1))
    return updated / whole if whole > 0 else None


def settled_after(record: Record) -> int:
    """T_f of the run's task: figures of stable freezing are over the steps after it, for every method."""
    task = record["task"]
    return int(task["warmup"] + task["monitoring"] + task["progressive"])


def figures(record: Record, baseline: Record) -> Figures:
    """The figures of a run; ``baseline`` is the one of the same task, schedule and seed."""
    steps, settled = record["task"]["steps"], settled_after(record)
    at, losses, accuracies = (list(column) for column in zip(*record["curve"], strict=True))
    loss, accuracy = interpolate(steps, at, losses), interpolate(steps, at, accuracies)
    assert loss is not None
    assert accuracy is not None
    lowest = min(held_out for step, held_out in zip(at, losses, strict=True) if step <= steps)
    if Cell.of(record).method == BASELINE:
        return Figures(accuracy, loss, lowest, accuracy, loss)
    time = clock(phases_of(record), record["pairs"])
    times = [time[int(step)] for step in at]
    pairs = [pair for pair in record["pairs"] if settled < pair[0] <= steps]
    shares = [share for stage in record["stages"] for share in stage["frozen_share"][settled:steps]]
    return Figures(
        accuracy,
        loss,
        lowest,
        accuracy_at_time=interpolate(steps, times, accuracies),
        loss_at_time=interpolate(steps, times, losses),
        kappa=statistics.median(pair[2] / pair[1] for pair in pairs) if pairs else None,
        p_eff=p_eff(record, settled, steps),
        p_eff_batches=p_eff(record, settled, steps, of_batches=True),
        kappa_run=time[steps] / steps,
        p_eff_run=p_eff(record, 0, steps),
        planned_kappa=record["planned_step_ratio"],
        freeze_ratio=statistics.fmean(shares) if shares else None,
        time_to_loss=_to_loss(times, losses, baseline),
        steps_to_loss=_to_loss(at, losses, baseline),
        step_ms_alone=statistics.median(pair[1] for pair in record["pairs"]),
    )


def _to_loss(times: Sequence[float], losses: Sequence[float], baseline: Record) -> float | None:
    """Until the loss that the baseline has in the end, over the baseline's own time until it is there first."""
    theirs = [point for point in baseline["curve"] if point[0] <= baseline["task"]["steps"]]
    level = theirs[-1][1]
    own = first_time_at(level, [point[0] for point in theirs], [point[1] for point in theirs])
    mine = first_time_at(level, times, losses)
    return mine / own if mine is not None and own else None


# --- all runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the ``count`` seeds that have a value."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0, len(known))


Summary = dict[tuple[str, str, str], dict[str, Spread | None]]
"""By task, schedule and variant: each of the figures by name."""

NAMES = (*(item.name for item in fields(Figures)), "throughput", "kappa_below_p_eff")


def by_run(records: Sequence[Record]) -> list[tuple[Cell, Figures]]:
    """The figures of each run whose baseline is finished too."""
    cells = [Cell.of(record) for record in records]
    baselines: Mapping[tuple[str, str, int], Record] = {
        (cell.task, cell.schedule, cell.seed): record
        for cell, record in zip(cells, records, strict=True)
        if cell.method == BASELINE
    }
    return [
        (cell, figures(record, baselines[cell.task, cell.schedule, cell.seed]))
        for cell, record in zip(cells, records, strict=True)
        if (cell.task, cell.schedule, cell.seed) in baselines
    ]


def summarise(records: Sequence[Record]) -> Summary:
    """Mean and spread over seeds, in the order in which the groups come first."""
    groups: dict[tuple[str, str, str], list[Figures]] = {}
    for cell, of_run in by_run(records):
        groups.setdefault(cell.group, []).append(of_run)
    return {
        group: {name: Spread.of(getattr(run, name) for run in runs) for name in NAMES} for group, runs in groups.items()
    }
