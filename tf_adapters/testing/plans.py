"""Give a controller plans and units that a test chooses, instead of measured ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tf_adapters.measuring.measurement import Measurement
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.training.plan_maker import Planned

if TYPE_CHECKING:
    from tf_adapters.training.controller import Controller


def tensor_units(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[FreezeUnit, ...]:
    """Return one unit for each trainable tensor, with its number of elements as work."""
    return tuple(
        FreezeUnit((name,), float(parameter.numel()), tuple(parameter.shape))
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.numel()
    )


Ratios = float | Mapping[str, float] | Callable[[Action], float]


def force_plan(controller: Controller, ratios: Ratios) -> None:
    """Put a controller into stable freezing with these freeze ratios in [0, 1]. Do the same on every rank.

    ``ratios`` is one number for all backwards, a mapping by an action's text (``"1B0"``, 0 if missing), or a function.
    With deferred weight gradients the order is rewritten for F of 1 ms, I of 2 ms and W of 1 ms. With two or more
    stages, two extra microbatches then also move forwards, if the host can.
    """
    controller.decide()  # about the last step, before it looks like a step of this plan
    forward, backward = Bounds(1.0, 1.0), Bounds(2.0, 3.0)
    times = {a: forward if a.kind is Kind.FORWARD else backward for a in controller.schedule.actions}
    moves_forwards = controller.pipeline.moves_forwards
    limits = Limits(max_freeze_ratio=0.0, **controller.config.deferral_limits, moves_forwards=moves_forwards)
    made = solve(PlanProblem(Measurement(controller.schedule, times), limits))
    data = {**made.to_json(), "freeze_ratio": {str(a): _ratio(ratios, a) for a in made.freeze_ratio}}
    _put_in_force(controller, FreezePlan.from_json(data))


def force_order(controller: Controller, order: PipelineSchedule) -> None:
    """Put a controller into stable freezing with nothing frozen and this order of the batch. Do the same on every rank.

    F take 1 ms, I 2 ms, W 1 ms and B 3 ms.
    """
    controller.decide()
    ms = {Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0, Kind.INPUT_GRAD: 2.0, Kind.WEIGHT_GRAD: 1.0}
    times = {action: Bounds(ms[action.kind], ms[action.kind]) for action in order.actions}
    made = solve(PlanProblem(Measurement(order, times), Limits(max_freeze_ratio=0.0)))
    _put_in_force(controller, replace(made, schedule=order))
    controller.state.left_to_host = False  # whatever control steps said of an earlier order


def _put_in_force(controller: Controller, plan: FreezePlan) -> None:
    """Adopt a plan, and go on to stable freezing."""
    state = controller.state
    state.measurement = replace(state.measurement, unfrozen_step_ms=1.0)
    state.adopt(controller.schedule, Planned(plan, step_ms=1.0))
    state.completed_steps = max(state.completed_steps, state.phases.progressive_end)


def _ratio(ratios: Ratios, action: Action) -> float:
    if callable(ratios):
        return ratios(action)
    if not isinstance(ratios, Mapping):
        return ratios
    return ratios.get(str(action), ratios.get(f"{action.stage}B{action.microbatch}", 0.0))
