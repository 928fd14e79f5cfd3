"""What the accuracy study decides: is a method within the seeds' spread of no freezing, and on the Pareto front?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.cells import BASELINE, Record
from benchmarks.accuracy.figures import Figures, Spread, Summary, by_run, summarise

Group = tuple[str, str, str]

HELD_OUT = {"accuracy": 1.0, "loss": -1.0}
"""The held-out metrics at equal steps, and 1 where more is better, -1 where less is."""


@dataclass(frozen=True)
class Verdict:
    """A variant of a method on one task and schedule, next to no freezing.

    Attributes:
        off: by held-out metric, its difference to no freezing of the same seed, mean and deviation over seeds.
        alone: by held-out metric, no freezing itself, mean and deviation over seeds.
        throughput: of stable freezing over the baseline's, mean over seeds.
        beaten_by: variants that are at least as accurate (equal steps) and as fast, and one of it more.
    """

    off: Mapping[str, Spread]
    alone: Mapping[str, Spread]
    throughput: float
    beaten_by: tuple[str, ...]

    def within(self, metric: str) -> bool | None:
        """Return True if the mean is worse by at most the deviation of no freezing over seeds; None for one seed."""
        if self.alone[metric].count < 2:
            return None
        return self.off[metric].mean * HELD_OUT[metric] >= -self.alone[metric].deviation


def verdicts(records: Sequence[Record]) -> dict[Group, Verdict]:
    """One for each task, schedule and variant that freezes, in the order in which they come first."""
    runs, summary = by_run(records), summarise(records)
    baselines = {(cell.task, cell.schedule, cell.seed): run for cell, run in runs if cell.method == BASELINE}
    pairs: dict[Group, list[tuple[Figures, Figures]]] = {}
    for cell, run in runs:
        if cell.method != BASELINE:
            pairs.setdefault(cell.group, []).append((run, baselines[cell.task, cell.schedule, cell.seed]))
    return {group: _verdict(group, of_group, summary) for group, of_group in pairs.items()}


def _verdict(group: Group, pairs: Sequence[tuple[Figures, Figures]], summary: Summary) -> Verdict:
    task, schedule, _ = group
    baseline = summary[task, schedule, BASELINE]
    off, of_alone = {}, {}
    for metric in HELD_OUT:
        difference = Spread.of(getattr(run, metric) - getattr(alone, metric) for run, alone in pairs)
        of_baseline = baseline[metric]
        assert difference is not None
        assert of_baseline is not None
        off[metric], of_alone[metric] = difference, of_baseline
    _, throughput = _point(summary, group)
    return Verdict(off, of_alone, throughput, _beaten_by(group, summary))


def _beaten_by(group: Group, summary: Summary) -> tuple[str, ...]:
    own = _point(summary, group)
    rivals = {other[2]: _point(summary, other) for other in summary if other[:2] == group[:2]}
    return tuple(variant for variant, point in rivals.items() if _beats(point, own))


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """At least as good in both, and better in one."""
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def _point(summary: Summary, group: Group) -> tuple[float, float]:
    """Mean accuracy at equal steps and mean throughput; the baseline's throughput is 1."""
    accuracy, throughput = summary[group]["accuracy"], summary[group]["throughput"]
    assert accuracy is not None
    return accuracy.mean, throughput.mean if throughput else 1.0
