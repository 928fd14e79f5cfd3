"""From measured times to freeze ratios: the linear program, its solvers, and the forecast of a step under a plan."""

from tf_adapters.planner.freeze_plan import FreezePlan, Makespan, SolverReport
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.program import SolverStatus
from tf_adapters.planner.solve import plan, plan_from_json
from tf_adapters.schedule.durations import Bounds

__all__ = [
    "Bounds",
    "FreezePlan",
    "Makespan",
    "PlanProblem",
    "SolverReport",
    "SolverStatus",
    "plan",
    "plan_from_json",
]
