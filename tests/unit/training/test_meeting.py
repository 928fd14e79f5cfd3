"""The line of the log that says whether ranks meet between steps, and what it costs."""

from __future__ import annotations

from dataclasses import replace

from problems import plan_problem

from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Kind
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.training import log_lines

TIMES = {Kind.FORWARD: Bounds(10.0, 10.0), Kind.BACKWARD: Bounds(12.0, 22.0)}


def problem(stages: int, steps: str) -> PlanProblem:
    schedule = one_forward_one_backward(stages, 8)
    times = {action: TIMES[action.kind] for action in schedule.actions}
    return plan_problem(schedule, times, 0.0, defer=True, extra_microbatches=4, steps=steps)


def line(of: PlanProblem, *meetings: str) -> str:
    return log_lines.meeting(of.measurement, solve(of), meetings)


def test_steps_that_overlap():
    assert line(problem(4, "overlap")) == (
        "ranks do not meet between steps: as planned, a new step begins every 260.0 ms, "
        "and a batch takes 286.0 ms from its first action to its last"
    )


def test_ranks_that_meet_pay_for_it():
    said = line(problem(4, "meet"), "tied weights", "clip_grad 1")
    assert said.startswith("all ranks meet between steps, which costs ")
    assert said.endswith("ms of each step; what makes them meet: tied weights, clip_grad 1")
    assert line(problem(4, "meet")).endswith(
        "a norm over all gradients, a reduced loss or a barrier in the training loop"
    )


def test_a_cost_of_next_to_nothing_is_not_said():
    one = problem(1, "meet")
    assert line(replace(one), "tied weights") == ""


def test_what_is_not_clear_is_not_claimed():
    for steps, end in (("meet", "ms of each step"), ("overlap", "for ranks that do not meet is faster")):
        of = problem(4, steps)
        said = log_lines.meeting(of.measurement, solve(of), (), is_clear=False)
        assert said.startswith("it is not clear whether all ranks meet between steps")
        assert said.endswith(end)
