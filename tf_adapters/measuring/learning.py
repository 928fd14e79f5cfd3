"""The cost of freezing in learning: the progress that a step makes, as a share of that of a step with nothing frozen.

A batch's gradient is signal to a share ``s`` and noise otherwise. A step along it gains in proportion to ``s``, if the
step's length is right for this ``s`` (McCandlish et al. 2018, equation 2.7; Qiao et al. 2021, "Pollux", section 3.1).
Skipped and sampled weight gradients make the gradient noisier, not wrong: a stage whose noise is ``v`` times as large
makes ``1 / (s + (1 - s) v)`` of the progress. With Adam and similar optimizers the progress is the square root of this
share, since these optimizers divide by the size of the gradient
(Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from tf_adapters.measuring.estimates import merged
from tf_adapters.measuring.token_cost import CostPair, TokenCost
from tf_adapters.schedule.durations import Quotient, Ratio
from tf_adapters.values import Value

SAMPLED_AT = 0.25
"""The share of the tokens at which the noise of a draw is measured."""


class Probe(NamedTuple):
    """Estimates from the gradients of one step's single microbatches, on one stage, summed over the elements seen.

    ``signal`` is the square of the gradient's mean, an unbiased estimate that may be below 0. ``noise`` is the variance
    between microbatches. ``draws`` is the variance that drawing ``SAMPLED_AT`` of the tokens would add, or 0.
    """

    signal: float
    noise: float
    draws: float

    @property
    def is_usable(self) -> bool:
        return all(map(math.isfinite, self)) and self.noise > 0.0


class StepProgress(NamedTuple):
    """Progress of a step as a share of that of a step with nothing frozen, and its standard error."""

    share: float
    error: float


@dataclass(frozen=True)
class StageLearning:
    """One stage's gradient.

    Attributes:
        signal: the share of the whole batch's gradient, by its expected square, that is signal; in [0, 1].
        error: its standard error.
        draws: the noise that drawing tokens adds, per unit of ``1 / kept - 1``, over the noise between microbatches;
            None where tensors are frozen whole.
        cost: what a draw of tokens takes.
    """

    signal: Ratio
    error: Quotient
    draws: Quotient | None = None
    cost: CostPair = field(default_factory=TokenCost)

    def added_noise(self, ratios: Sequence[float]) -> float:
        """Return the noise that freezing adds, from the freeze ratios of the stage's microbatches.

        The unit is ``draws`` where tokens are drawn, and the noise between microbatches where tensors are frozen whole.
        """
        if self.draws is not None:
            return sum(map(self.cost.noise, ratios)) / len(ratios)
        computed = len(ratios) - sum(ratios)
        return sum(ratios) / computed if computed > 0.0 else math.inf

    def of_batch(self, times: float) -> StageLearning:
        """Rescale for batches with ``times`` as many microbatches, whose noise is lower by that factor."""
        left = self.signal + (1.0 - self.signal) / times
        return replace(self, signal=self.signal / left, error=self.error / times / left**2)

    def progress(self, added_noise: float, adaptive: bool = False) -> StepProgress:
        """Return the progress of a step with ``added_noise``, along the gradient or with an ``adaptive`` optimizer."""
        if math.isinf(added_noise):
            return StepProgress(0.0, 0.0)
        noise = 1.0 + added_noise * (1.0 if self.draws is None else self.draws)
        share = 1.0 / (self.signal + (1.0 - self.signal) * noise)
        error = (noise - 1.0) * share**2 * self.error
        if adaptive:
            share, error = math.sqrt(share), error / (2.0 * math.sqrt(share))
        return StepProgress(share, error)


def _named(stage: Any) -> Any:
    """Name the fields of a stage that an earlier version wrote as a list."""
    if not isinstance(stage, list):
        return stage
    named = dict(zip(("signal", "error", "draws"), stage, strict=False))
    return named | {"cost": stage[3:]} if stage[3:] else named


@dataclass(frozen=True)
class Learning(Value):
    """The data by which the plan that pays most is chosen. ``stages`` are all that have anything to freeze."""

    stages: Mapping[int, Annotated[StageLearning, BeforeValidator(_named)]]
    adaptive: bool = False

    def progress(self, added_noise: Mapping[int, float]) -> StepProgress:
        """Return the progress of a step with ``added_noise`` on each stage: the mean over the stages."""
        every = [of_stage.progress(added_noise[stage], self.adaptive) for stage, of_stage in self.stages.items()]
        errors = math.sqrt(sum(progress.error**2 for progress in every))
        return StepProgress(sum(progress.share for progress in every) / len(every), errors / len(every))

    def of_batch(self, times: float) -> Learning:
        return replace(self, stages={stage: of_stage.of_batch(times) for stage, of_stage in self.stages.items()})

    @classmethod
    def measured(
        cls,
        ranks: Iterable[Mapping[int, Sequence[Probe]]],
        batch: int,
        costs: Mapping[int, TokenCost],
        adaptive: bool = False,
    ) -> Learning | None:
        """Estimate it from the probes of all ranks; None if a stage has no probe.

        ``batch`` is the number of microbatches of a step, of all replicas; ``costs`` are by stage, where tokens are
        drawn.
        """
        by_stage = merged(({stage: list(probes) for stage, probes in of.items()} for of in ranks), operator.add)
        if not by_stage or not all(by_stage.values()):
            return None
        return cls({s: _of_probes(by_stage[s], batch, costs.get(s)) for s in sorted(by_stage)}, adaptive=adaptive)


def _of_probes(probes: Sequence[Probe], batch: int, cost: TokenCost | None) -> StageLearning:
    signal = _signal_share(probes, batch)
    left_out = [_signal_share([*probes[:i], *probes[i + 1 :]], batch) for i in range(len(probes))]
    if len(probes) > 1:  # the jackknife
        error = math.sqrt((len(probes) - 1) / len(probes) * sum((other - signal) ** 2 for other in left_out))
    else:
        error = min(signal, 1.0 - signal)
    if cost is None:
        return StageLearning(signal, error)
    at = 1.0 / SAMPLED_AT - 1.0
    draws = sum(probe.draws for probe in probes) / sum(probe.noise for probe in probes) / at
    return StageLearning(signal, error, draws, cost)


def _signal_share(probes: Sequence[Probe], batch: int) -> float:
    signal = max(0.0, sum(probe.signal for probe in probes))
    noise = sum(probe.noise for probe in probes) / batch
    return signal / (signal + noise) if probes else 0.0
