"""From a run's state to the actual freeze ratios of each step, and from these to masks.

Nothing here changes anything or talks to anybody: every rank, every replica and a restarted run find the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.selection.masks import NONE_PREFERRED, Mask, StageMasks
from tf_adapters.training.state import RunState

_FIRST_STAGE_MONITORING_RATIO = 0.8  # far along the line, yet short of its end


class FreezeRatios:
    """The freeze ratios of a schedule's microbatches under a run's settings.

    ``weight_gradients`` holds the action of the host's order that computes the weight gradients of a
    (stage, microbatch).
    """

    def __init__(self, config: TimelyFreezeConfig, schedule: PipelineSchedule, masks: StageMasks) -> None:
        self._config, self._masks = config, masks
        self._microbatches = schedule.num_microbatches
        self.weight_gradients: Mapping[tuple[int, int], Action] = {
            (action.stage, action.microbatch): action for action in schedule.actions if action.freezable
        }

    def _monitors_with_masks(self, state: RunState) -> bool:
        return not state.failure and self._config.monitors_with_masks

    def ratio(self, state: RunState, step: int, action: Action) -> float:
        """Return the actual freeze ratio (AFR) of an action at a step, in [0, 1] (paper section 3.3).

        While monitoring, it is the ratio of the monitoring mask. If APF or AutoFreeze runs without a plan, it is the
        stable units' share of the stage's work.
        """
        if not action.freezable:
            return 0.0
        if compiling := self._compiling(state, step, action.stage):
            return compiling[action.microbatch].share
        if self._config.plans and state.phases.phase(step).monitors:
            return self._monitoring_ratio(state, step, action) if self._monitors_with_masks(state) else 0.0
        if not state.freezes(self._config) or state.is_control(step):
            return 0.0
        if not self._config.plans:
            return self._masks.share(action.stage, self.stable(state, step, action.stage))
        if state.plan is None:
            return 0.0
        return state.plan.ratio_of_microbatch[action.stage, action.microbatch] * state.phases.ramp(step)

    def masks(self, state: RunState, step: int, stage: int) -> tuple[Mask, ...]:
        """Return the mask of each microbatch on ``stage`` at ``step``."""
        if compiling := self._compiling(state, step, stage):
            return compiling
        actions = (self.weight_gradients.get((stage, microbatch)) for microbatch in range(self._microbatches))
        ratios = [0.0 if action is None else self.ratio(state, step, action) for action in actions]
        return self._masks.draw(step, stage, ratios, self.stable(state, step, stage))

    def stable(self, state: RunState, step: int, stage: int) -> frozenset[int]:
        """Return the units of a stage that the last stability check found stable, by index."""
        freezing = step > state.phases.monitoring_end  # monitoring is of uniform masks
        return state.stability.stable.get(stage, NONE_PREFERRED) if freezing else NONE_PREFERRED

    def _compiling(self, state: RunState, step: int, stage: int) -> tuple[Mask, ...]:
        """Return the masks of the last steps of the warm-up, which make compiled layers compile in advance.

        All other steps have no such masks. A compiled layer needs another graph if it is frozen, and another if its
        input needs no gradient. The latter happens on the first stage that trains, behind frozen layers. These masks
        show every layer in each of its states.
        """
        if not self._config.freezes_blocks or not self._monitors_with_masks(state):
            return ()
        shown = {stage: self._states(stage) for stage in self._masks.stages}
        steps = -(-max(map(len, shown.values()), default=0) // self._microbatches)
        passed = step - 1 - (state.phases.warmup_end - steps)
        if not 0 <= passed < steps or step > state.phases.warmup_end:
            return ()
        first = passed * self._microbatches
        masks = [*shown[stage][first : first + self._microbatches]]
        masks += [frozenset()] * (self._microbatches - len(masks))
        return tuple(self._masks.of_units(stage, frozen) for frozen in masks)

    def _states(self, stage: int) -> list[frozenset[int]]:
        """Sets of units of a stage which, frozen one after the other, bring each unit into all of its states."""
        units = range(len(self._masks.units[stage]))
        if stage != self._masks.first_training_stage:
            return [frozenset(units)] if units else []
        return [*(frozenset(units[: last + 1]) for last in units), frozenset(units[1:])]

    def _monitoring_ratio(self, state: RunState, step: int, action: Action) -> float:
        """Return the ratio with which a step of monitoring freezes. It does not freeze the whole first stage.

        The backward of that stage would disappear, and no mask of the plan reaches that time. The first stage is stage
        0, or the first behind stages that train nothing, where torch asks for no input gradient either. If its
        units have limits, a ratio of 1 freezes all of it only now and then. With limits close to 1 it nearly always
        does.
        """
        if state.phases.phase(step) is Phase.MONITORING_UPPER:
            return 0.0
        vanishes = action.stage == self._masks.first_training_stage and not self._masks.excludes[action.stage]
        most = _FIRST_STAGE_MONITORING_RATIO if vanishes else 1.0
        if not state.phases.mixed:
            return most
        turn = state.phases.mixed_turn(step)
        return most * mixed_ratio(turn, action.stage, action.microbatch, self._microbatches)


def mixed_ratio(turn: int, stage: int, microbatch: int, microbatches: int) -> float:
    """The freeze ratio in [0, 1] of a microbatch in the ``turn``-th step (from 0) of mixed monitoring that freezes.

    The microbatches of a stage take ratios from 0 to 1 in equal distances, each another one in the next turn: every
    step shows the whole line and updates every parameter. A single microbatch takes a half, so that each parameter
    misses every second of these steps.
    """
    return 0.5 if microbatches == 1 else (microbatch + turn + stage) % microbatches / (microbatches - 1)
