"""A report of two ranks and two microbatches, whose numbers can be worked out by hand."""

from __future__ import annotations

from typing import Any

from tf_adapters.report import Report
from tf_adapters.schedule.ir import Kind, PipelineSchedule

MS = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0, Kind.INPUT_GRAD: 10.0, Kind.WEIGHT_GRAD: 10.0}
"""How long actions take in a run that only measures, in ms."""

RANKS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
# 1F1B over two ranks, ms: 0F0 0-10, 1F0 10-20, 1B0 20-40, 1F1 40-50, 1B1 50-70, 0B0 40-60, 0B1 70-90.
TIMES = {text: [10.0, 10.0] if "F" in text else [10.0, 20.0] for texts in RANKS for text in texts}
PLAN = {
    "makespan_ms": {"unfrozen": 90.0, "planned": 65.0, "fully_frozen": 60.0},
    "freeze_ratio": {"0B0": 0.0, "0B1": 1.0, "1B0": 1.0, "1B1": 0.5},
    "start_ms": {
        **{"0F0": 0.0, "0F1": 10.0, "0B0": 30.0, "0B1": 55.0},
        **{"1F0": 10.0, "1B0": 20.0, "1F1": 30.0, "1B1": 40.0},
    },
    "duration_ms": {
        **{"0F0": 10.0, "0F1": 10.0, "0B0": 20.0, "0B1": 10.0},
        **{"1F0": 10.0, "1B0": 10.0, "1F1": 10.0, "1B1": 15.0},
    },
    "mean_freeze_ratio": 0.625,
    "stage_freeze_ratio": {"0": 0.5, "1": 0.75},
    "critical_path": ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"],
    "solver": {"name": "GLOP", "status": "OPTIMAL", "seconds": 0.01, "optimality_gap": 0.0},
}
MEASURED = {
    "step_ms_unfrozen": 812.0,
    "step_ms_stable": 601.0,
    "step_ratio": 601.0 / 812.0,
    "forward_pace": 1.02,
    "planned_step_ms": 592.7,
    "planned_ratio": 592.7 / 812.0,
    "host_step_ms": 795.0,
    "speedup": 1.32,
    "speedup_interval": [1.29, 1.34],
    "control_steps": 8,
    "mean_afr": {"0": 0.49, "1": 0.76},
    "backward_ms": [
        {"action": "0B0", "afr": 0.0, "ms": 20.0, "phase": None},
        {"action": "0B1", "afr": 0.0, "ms": 20.0, "phase": None},
        {"action": "0B1", "afr": 1.0, "ms": 10.0, "phase": None},
        {"action": "0B0", "afr": 0.0, "ms": 21.0, "phase": None},
        {"action": "0B1", "afr": 0.99, "ms": 12.0, "phase": None},
        {"action": "0B1", "afr": 1.0, "ms": 11.0, "phase": None},
    ],
    "peak_memory_bytes": {"unfrozen": [3 * 2**30, 2**30], "planned": [3 * 2**30, 2**31], "stable": [2 * 2**30, 2**30]},
}


def report_data(**changes: Any) -> dict[str, Any]:
    """A report as its file has it."""
    data = {
        "format": 1,
        "host": {"name": "deepspeed", "version": "0.19.8"},
        "schedule": {"ranks": RANKS},
        "status": "stable",
        "step": 400,
        "times": TIMES,
        "plan": PLAN,
    }
    return {**data, **changes}


def report(**changes: Any) -> Report:
    return Report.from_json(report_data(**changes))


def report_of(schedule: PipelineSchedule, lower: float = 10.0, **more: Any) -> Report:
    """A run that measured ``MS``; a backward with everything frozen takes ``lower``."""
    least = {**MS, Kind.BACKWARD: lower}
    return Report.from_json({
        "format": 1,
        "host": {"name": "torch.distributed.pipelining", "version": "2"},
        "config": {"method": "none", "max_freeze_ratio": 0.8},
        "schedule": {"ranks": schedule.to_text()},
        "status": "stable",
        "step": 60,
        "times": {str(a): [least[a.kind], MS[a.kind]] for a in schedule.actions},
        "measured": {"step_ms_unfrozen": 100.0},
        **more,
    })  # fmt: skip
