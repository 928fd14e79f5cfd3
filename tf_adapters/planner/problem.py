"""The planner's input. A refusal is one line that names the field, its value and what is allowed."""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from typing import Annotated, Any

from pydantic import Field, StrictBool

from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.token_cost import TokenCost, slower_cost
from tf_adapters.schedule.durations import Ratio, Time
from tf_adapters.values import Value

_MOST_FROZEN = 0.9
_MOST_MICROBATCHES = 10**9


@dataclass(frozen=True)
class Limits(Value):
    """The limits of a plan.

    Attributes:
        max_freeze_ratio: the largest mean freeze ratio of a stage's B and W actions, in [0, 1].
        target_makespan_ms: a batch that ends by then, or a period of this length, is short enough; 0 asks for the
            shortest.
        max_action_freeze_ratio: the largest freeze ratio of any one B or W action, in [0, 1].
        max_microbatch_freeze_ratio: the largest mean freeze ratio of a microbatch over the stages, in [0, 1].
        defer: let weight gradients wait. A B becomes an I, which takes the B's lower bound, and a W, which takes the
            time that full freezing saves. The next four limits count only with ``defer``.
        extra_microbatches: how many microbatches more than the host's fullest rank a rank may hold; below 0, so many
            fewer.
        fills_memory: let each rank hold as many microbatches as the measurement's ``fitting_microbatches`` says
            instead, if the measurement has them.
        moves_forwards: whether forwards and input gradients may also change their order.
        moves_stages: whether the stages of a rank may then change their order, too, to need less memory.
    """

    max_freeze_ratio: Ratio
    target_makespan_ms: Time = 0.0
    max_action_freeze_ratio: Ratio = 1.0
    max_microbatch_freeze_ratio: Ratio = 1.0
    defer: StrictBool = False
    extra_microbatches: Annotated[int, Field(ge=-_MOST_MICROBATCHES, le=_MOST_MICROBATCHES, strict=True)] = 0
    fills_memory: StrictBool = False
    moves_forwards: StrictBool = True
    moves_stages: StrictBool = True

    @classmethod
    def of_training(cls, max_freeze_ratio: float, **others: Any) -> Limits:
        """The limits of a training run: no microbatch is frozen nearly whole, so that each one teaches something.

        Where a stage's mean may be above 0.9, a microbatch's may be, too.
        """
        return cls(max_freeze_ratio, max_microbatch_freeze_ratio=max(_MOST_FROZEN, max_freeze_ratio), **others)


@dataclass(frozen=True)
class PlanProblem:
    """The input of the planner: a measurement and the limits of a plan.

    With ``measurement.token_costs``, no ratio is above the largest one that drawing tokens can reach. Among the plans
    that end as early, the one with the least noise is then chosen instead of the one with the least freezing.
    """

    measurement: Measurement
    limits: Limits

    def validate(self) -> PlanProblem:
        """The same problem, checked; pairs of times become Bounds.

        Raises ScheduleError for a schedule that cannot run, PlanInputError for anything else.
        """
        return PlanProblem(self.measurement.validate(), Limits.from_json(vars(self.limits)))

    @cached_property
    def token_cost(self) -> TokenCost | None:
        """The largest of the stages' costs; None where no tokens are sampled."""
        costs = self.measurement.token_costs.values()
        return reduce(slower_cost, costs) if costs else None

    @property
    def most_frozen(self) -> float:
        """The largest freeze ratio of any one action, in [0, 1]."""
        cost = self.token_cost
        return min(self.limits.max_action_freeze_ratio, cost.most_frozen if cost else 1.0)

    def price(self, ratio: float) -> float:
        """The cost to minimise among plans that end as early, for one action: its ratio, or the noise of its draw."""
        return self.token_cost.noise(ratio) if self.token_cost else ratio

    def to_json(self) -> dict[str, Any]:
        """The INPUT object of ``tf-adapters plan``; actions and edges become text keys."""
        return {**self.measurement.to_json(), **self.limits.to_json()}

    @classmethod
    def from_json(cls, data: object) -> PlanProblem:
        """Read and validate an INPUT object. Raises PlanInputError."""
        if not isinstance(data, dict):
            raise PlanInputError(f"the input is {reprlib.repr(data)}: expected an object with {_ALLOWED}")
        for key in data:
            if key not in _FIELDS:
                close = difflib.get_close_matches(str(key), _FIELDS, n=1)
                hint = f" (did you mean '{close[0]}'?)" if close else f": allowed are {_ALLOWED}"
                raise PlanInputError(f"unknown field {reprlib.repr(key)}{hint}")
        if data.get("token_cost") is not None:
            data = {**data, "token_costs": {0: data["token_cost"]}}
        return cls(Measurement.from_json(data), Limits.from_json(data))


_FIELDS = ("ranks", *[field.name for kind in (Measurement, Limits) for field in fields(kind)][1:], "token_cost")
"""``token_cost`` is one for all stages."""

_UNUSED = ("unfrozen_step_ms", "other_ms", "batch_times", "token_cost")
_ALLOWED = ", ".join(name for name in _FIELDS if name not in _UNUSED)
