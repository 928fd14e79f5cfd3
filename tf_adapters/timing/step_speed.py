"""How fast each monitored step ran: what slows a whole step down slows its forwards too, and they do not freeze.

A neighbour's load, the clock rate: most of what disturbs measurements on real machines lasts longer than an action.
Forwards do the same work whatever is frozen (paper section 3.2.1), so every step carries its own yardstick. Samples
divided by the pace of their step have that noise taken out, and a change of speed between frozen and unfrozen steps
is not taken for an effect of freezing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.timing.estimates import Estimate, estimate, median, shrink
from tf_adapters.timing.phase import Phase
from tf_adapters.timing.timer import ActionTimer, Sample

_MONITORED = (Phase.MONITORING_UPPER, Phase.MONITORING_LOWER, Phase.MONITORING_MIXED)


class PacedSamples:
    """One rank's samples from monitoring, as they would be if every step had run at the usual pace.

    The pace of a step is how many times as long its forwards took as those of the median step with nothing frozen:
    their median, moved to the middle of all steps as far as the forwards of one step disagree about it. Where backwards
    run long after the forwards (GPipe), that may say nothing about them: paces are used only if unfrozen backwards
    differ less from step to step with them than without.
    """

    def __init__(self, timer: ActionTimer) -> None:
        self._timer = timer
        self._paces = _paces(timer)

    def samples(self, phase: Phase, action: Action) -> tuple[Sample, ...]:
        """As ``ActionTimer.samples``, ms at the usual pace."""
        found = self._timer.samples(phase, action)
        paces = self._of(phase, len(found))
        return tuple(Sample(sample.share, sample.ms / pace) for sample, pace in zip(found, paces, strict=True))

    def first_parts(self, phase: Phase, action: Action) -> tuple[float, ...]:
        """As ``ActionTimer.first_parts``: shares need no pace."""
        return self._timer.first_parts(phase, action)

    def actions(self, phase: Phase) -> tuple[Action, ...]:
        return self._timer.actions(phase)

    def step_ms(self, phase: Phase) -> float | None:
        """As ``ActionTimer.step_ms``, at the usual pace."""
        steps = self._timer.steps_ms(phase)
        return median(ms / pace for ms, pace in zip(steps, self._of(phase, len(steps)), strict=True))

    def _of(self, phase: Phase, steps: int) -> Sequence[float]:
        """The paces of a phase's steps; the usual one where it is not known of every step."""
        paces = self._paces.get(phase, ())
        return paces if len(paces) == steps else [1.0] * steps


def _paces(timer: ActionTimer) -> dict[Phase, list[float]]:
    seen = {
        (phase, number): pace
        for phase in _MONITORED
        for number, pace in enumerate(_estimates(timer, phase, forwards=True))
    }
    paces: dict[Phase, list[float]] = {}
    for (phase, _), pace in shrink(seen).items():
        paces.setdefault(phase, []).append(pace or 1.0)
    return paces if _help(timer, paces.get(Phase.MONITORING_UPPER, [])) else {}


def _help(timer: ActionTimer, paces: Sequence[float]) -> bool:
    """Whether unfrozen backwards differ less from step to step once they are divided by their step's pace."""
    backwards = [found.value for found in _estimates(timer, Phase.MONITORING_UPPER, forwards=False)]
    if len(backwards) != len(paces):
        return not backwards
    raw, paced = estimate(backwards), estimate(b / pace for b, pace in zip(backwards, paces, strict=True))
    return raw is None or paced is None or paced.error <= raw.error


def _estimates(timer: ActionTimer, phase: Phase, forwards: bool) -> list[Estimate]:
    """Of each step of a phase, in order: how many times as long its forwards (or its backwards) took as usual."""
    usual = {
        action: median(sample.ms for sample in timer.samples(Phase.MONITORING_UPPER, action))
        for action in timer.actions(phase)
        if (action.kind is Kind.FORWARD) == forwards
    }
    ratios = [[sample.ms / ms for sample in timer.samples(phase, action)] for action, ms in usual.items() if ms]
    return [found for of_step in zip(*ratios, strict=False) if (found := estimate(of_step)) is not None]
