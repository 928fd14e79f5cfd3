"""Run the actions of stages with taps. A weight gradient is computed at the end of its backward B, or in its W.

F    taps are put on the layers' outputs
I    taps keep inputs and output gradients; other code can no longer change them when I has ended
W    the weight gradients are computed from what I has kept, in order
B    an I, then its W
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.training.plan_maker import RunSetup
from tf_adapters.training.state import RunState
from tf_adapters.training.tap_checks import TapChecks
from tf_adapters.weight_gradients.taps import RowSampler, StageTaps
from tf_adapters.weight_gradients.tokens import TokenSampler

Shares = Callable[[int], float]
"""The frozen share of a stage's work in a microbatch."""


class TappedActions:
    """Runs the actions of one rank's stages with their taps."""

    def __init__(self, setup: RunSetup, checks: TapChecks) -> None:
        self._config, self._pipeline, self._masks = setup.config, setup.pipeline, setup.masks
        self._checks = checks

    @contextmanager
    def around(
        self,
        state: RunState,
        action: Action,
        *,
        waits: bool,
        shares: Shares,
        halfway: Callable[[Action], None],
    ) -> Iterator[None]:
        """Run a host's computation inside.

        ``waits`` says that no update seems to come. Without a plan the host then computes everything. ``halfway`` is
        called when only weight gradients of the action are left.
        """
        taps, microbatch = self._pipeline.taps.get(action.stage), action.microbatch
        if taps is None or (waits and state.plan is None):
            yield
            return
        apart = not self._checks.all and self._computed_apart(state, action, shares(microbatch))
        with self._at_work(taps, action, apart):
            yield
        if action.freezable and not apart:
            taps.host_accumulated()
        elif action.freezable:
            halfway(action)
            self._compute(state, action.stage, microbatch, shares)
        elif action.kind is Kind.FORWARD and microbatch in taps.pending:
            # A backward ran inside this forward. The host accumulates its weight gradients now, after earlier ones.
            for earlier in taps.pending:
                self._compute(state, action.stage, earlier, shares)

    def _at_work(self, taps: StageTaps, action: Action, apart: bool) -> AbstractContextManager[None]:
        if action.kind is Kind.WEIGHT_GRAD:
            return nullcontext()
        if self._checks.all and action.kind is Kind.FORWARD:
            return self._checked_forward(taps, action)
        if self._checks.all:
            return taps.checking(action.microbatch)
        if self._checks.again:
            return taps.checking_again(action.microbatch, tapped=apart)
        return taps.recording(action.microbatch) if apart else nullcontext()

    @contextmanager
    def _checked_forward(self, taps: StageTaps, action: Action) -> Iterator[None]:
        with self._checks.forward(), taps.checking(action.microbatch):
            yield

    def _computed_apart(self, state: RunState, action: Action, share: float) -> bool:
        """Return whether the weight gradients of an action's microbatch are computed apart from its backward.

        Before there is a plan they are always computed apart, so that they can be timed. Under a plan they are computed
        apart only if they wait or are sampled in this step. The host's own backward computes them a little faster: what
        it reads is still in the processor's caches.
        """
        plan = state.plan
        if state.runs_as_host(state.completed_steps + 1):
            return False
        if plan is None or Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch) in plan.freeze_ratio:
            return True
        return self._config.samples_tokens and share > 0.0

    def _compute(self, state: RunState, stage: int, microbatch: int, shares: Shares) -> None:
        sampler = self._sampler(state, stage, microbatch, shares(microbatch))
        with self._pipeline.accumulating():
            self._pipeline.taps[stage].compute(microbatch, sampler)

    def _sampler(self, state: RunState, stage: int, microbatch: int, share: float) -> RowSampler | None:
        if not self._config.samples_tokens or not share:
            return None
        cost, caps = state.measurement.token_costs.get(stage, TokenCost()), self._masks.caps(stage)
        key = (self._config.seed, state.completed_steps + 1, stage, microbatch)
        return TokenSampler(key, lambda weight: cost.kept(share * caps.get(weight, 0.0)))
