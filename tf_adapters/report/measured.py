"""What a report holds of measured durations."""

from __future__ import annotations

from tf_adapters.report.schema import BackwardSample, Report

__all__ = ["stable_samples"]


def stable_samples(report: Report) -> dict[str, BackwardSample]:
    """By action, what stable freezing measured; empty before the stable phase.

    A report that does not say which sample is of which phase gives the one nearest to the planned ratio.
    """
    if report.status != "stable":
        return {}
    named = [sample for sample in report.measured.backward_ms if sample.phase]
    if named:
        return {sample.action: sample for sample in named if sample.phase == "stable"}
    ratios = {str(action): ratio for action, ratio in report.plan.freeze_ratio.items()} if report.plan else {}
    nearest: dict[str, tuple[float, BackwardSample]] = {}
    for sample in report.measured.backward_ms:
        away = abs(sample.afr - ratios.get(sample.action, 1.0))
        # Of equally near samples the last one counts: a report lists the stable phase after the monitoring.
        if sample.action not in nearest or away <= nearest[sample.action][0]:
            nearest[sample.action] = (away, sample)
    return {action: sample for action, (_, sample) in nearest.items()}
