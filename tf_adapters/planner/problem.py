"""What the planner is given. A refusal is one line that names the field, its value and what is allowed."""

from __future__ import annotations

import difflib
import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tf_adapters.errors import PlanInputError, ScheduleError
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.planner.learning import Learning
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule

__all__ = ["PlanProblem", "most_of_a_microbatch"]

_MOST_FROZEN = 0.9

_REQUIRED = ("ranks", "times", "max_freeze_ratio")
_DEFERRAL = ("defer", "extra_microbatches", "moves_forwards")
_RATIOS = ("max_freeze_ratio", "max_action_freeze_ratio", "max_microbatch_freeze_ratio")
_LIMITS = ("target_makespan_ms", *_RATIOS[1:])
_FIELDS = (*_REQUIRED, "communication", "overhead", "waits", *_LIMITS, "token_cost", *_DEFERRAL, "learning")


@dataclass(frozen=True)
class PlanProblem:
    """A schedule with its times in ms, and the limits of a plan for it.

    Attributes:
        schedule: the actions of each pipeline rank, in execution order.
        times: each action's duration, all frozen and nothing frozen. An F or I action computes no weight gradient:
            where its two times differ, it takes the second.
        max_freeze_ratio: the largest mean freeze ratio of a stage's B and W actions, in [0, 1].
        communication: ms on edges between stages; 0 where absent.
        overhead: ms that an action's rank spends before it, besides waiting for its input; 0 where absent.
        waits: ms from the end of an action to the start of one of another rank that waits for it otherwise than for its
            input: a send that its receiver has not begun to take, say.
        target_makespan_ms: a batch that ends by then is early enough; 0 asks for the earliest end.
        max_action_freeze_ratio: the largest freeze ratio of any one B or W action, in [0, 1].
        max_microbatch_freeze_ratio: the largest mean freeze ratio of a microbatch over the stages, in [0, 1].
        token_cost: what a draw takes, where ratios are met by sampling tokens. No ratio is then above what a draw can
            meet, and the plan makes least noise where it would otherwise freeze least.
        defer: let weight gradients wait: a B becomes an I, its lower bound, and a W, what full freezing saves.
        extra_microbatches: how many microbatches more than the host's fullest rank a rank may then hold.
        moves_forwards: whether forwards and input gradients may then stand in another order, too.
        learning: what freezing costs in learning; the plan is then the one that pays most, within these limits.
    """

    schedule: PipelineSchedule
    times: Mapping[Action, Bounds]
    max_freeze_ratio: float
    communication: Mapping[tuple[Action, Action], float] = field(default_factory=dict)
    overhead: Mapping[Action, float] = field(default_factory=dict)
    waits: Mapping[tuple[Action, Action], float] = field(default_factory=dict)
    target_makespan_ms: float = 0.0
    max_action_freeze_ratio: float = 1.0
    max_microbatch_freeze_ratio: float = 1.0
    token_cost: TokenCost | None = None
    defer: bool = False
    extra_microbatches: int = 0
    moves_forwards: bool = True
    learning: Learning | None = None

    def validate(self) -> PlanProblem:
        """The same problem with its numbers checked and made floats; pairs of times become Bounds.

        Raises ScheduleError for a schedule that cannot run, PlanInputError for anything else.
        """
        self.schedule.validate()
        actions = frozenset(self.schedule.actions)
        return PlanProblem(
            schedule=self.schedule,
            times=_check_times(self.schedule, actions, self.times),
            **{name: _check_ratio(getattr(self, name), name) for name in _RATIOS},
            communication=_check_communication(self.schedule, self.communication),
            overhead=_check_overhead(actions, self.overhead),
            waits=_check_waits(self.schedule, actions, self.waits),
            target_makespan_ms=_check_time(self.target_makespan_ms, "target_makespan_ms"),
            token_cost=_check_token_cost(self.token_cost),
            defer=_check_flag(self.defer, "defer"),
            extra_microbatches=_check_count(self.extra_microbatches, "extra_microbatches"),
            moves_forwards=_check_flag(self.moves_forwards, "moves_forwards"),
            learning=_check_learning(self.schedule, self.learning),
        )

    @property
    def most_frozen(self) -> float:
        """The largest freeze ratio of any one action, in [0, 1]."""
        return min(self.max_action_freeze_ratio, self.token_cost.most_frozen if self.token_cost else 1.0)

    def price(self, ratio: float) -> float:
        """What is to be least of plans that end as early, for one action: its ratio, or the noise of its draw."""
        return self.token_cost.noise(ratio) if self.token_cost else ratio

    @property
    def gaps(self) -> Gaps:
        """``communication``, ``overhead`` and ``waits``."""
        return Gaps(self.communication, self.overhead, self.waits)

    def to_json(self) -> dict[str, Any]:
        """The INPUT object of ``tf-adapters plan``; actions and edges become text keys."""
        return {
            "ranks": self.schedule.to_text(),
            "times": {str(action): [bounds.lower, bounds.upper] for action, bounds in self.times.items()},
            **self.gaps.to_json(),
            **{
                name: getattr(self, name) for name in ("max_freeze_ratio", *_LIMITS, *(_DEFERRAL if self.defer else ()))
            },
            **({"token_cost": self.token_cost.to_json()} if self.token_cost else {}),
            **({"learning": self.learning.to_json()} if self.learning else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> PlanProblem:
        """Read and validate an INPUT object. Raises PlanInputError."""
        if not isinstance(data, dict):
            raise PlanInputError(f"the input is {_show(data)}: expected an object with {', '.join(_FIELDS)}")
        for key in data:
            if key not in _FIELDS:
                close = difflib.get_close_matches(str(key), _FIELDS, n=1)
                hint = f" (did you mean '{close[0]}'?)" if close else ""
                raise PlanInputError(f"unknown field {_show(key)}{hint}: allowed are {', '.join(_FIELDS)}")
        for key in _REQUIRED:
            if key not in data:
                raise PlanInputError(f"{key}: missing")
        return cls(
            schedule=_read_ranks(data["ranks"]),
            times={_read_action(key, "times"): value for key, value in _object(data, "times").items()},
            max_freeze_ratio=data["max_freeze_ratio"],
            communication={_read_edge(key, "communication"): ms for key, ms in _object(data, "communication").items()},
            waits={_read_edge(key, "waits"): value for key, value in _object(data, "waits").items()},
            overhead={_read_action(key, "overhead"): value for key, value in _object(data, "overhead").items()},
            **{name: data[name] for name in (*_LIMITS, *_DEFERRAL) if name in data},
            token_cost=_read_token_cost(data.get("token_cost")),
            learning=Learning.from_json(data["learning"]) if data.get("learning") else None,
        ).validate()


def most_of_a_microbatch(max_freeze_ratio: float) -> float:
    """The mean freeze ratio over the stages that training lets no microbatch exceed: each one teaches something.

    Where a stage's mean may be above it, so may a microbatch's.
    """
    return max(_MOST_FROZEN, max_freeze_ratio)


def _check_ratio(value: object, field: str) -> float:
    number = _number(value)
    if number is None or not 0.0 <= number <= 1.0:
        raise PlanInputError(f"{field}: {_show(value)} is not a number from 0 to 1")
    return number


def _check_times(
    schedule: PipelineSchedule, actions: frozenset[Action], times: Mapping[Action, Any]
) -> dict[Action, Bounds]:
    _check_actions(actions, times, "times")
    for action in schedule.actions:
        if action not in times:
            raise PlanInputError(f"times: '{action}' is missing: each needs [all frozen, nothing frozen]")
    return {action: _check_bounds(action, times[action]) for action in schedule.actions}


def _check_communication(
    schedule: PipelineSchedule, communication: Mapping[tuple[Action, Action], Any]
) -> dict[tuple[Action, Action], float]:
    edges = set(schedule.transfers()) if communication else set()
    for source, target in communication:
        if (source, target) not in edges:
            raise PlanInputError(f"communication: '{source}->{target}' is not an edge between stages of the schedule")
    return {
        (source, target): _check_time(value, f"communication['{source}->{target}']")
        for (source, target), value in communication.items()
    }


def _check_overhead(actions: frozenset[Action], overhead: Mapping[Action, Any]) -> dict[Action, float]:
    _check_actions(actions, overhead, "overhead")
    return {action: _check_time(value, f"overhead['{action}']") for action, value in overhead.items()}


def _check_waits(
    schedule: PipelineSchedule, actions: frozenset[Action], waits: Mapping[tuple[Action, Action], Any]
) -> dict[tuple[Action, Action], float]:
    for edge in waits:
        _check_actions(actions, dict.fromkeys(edge), "waits")
    if waits:
        schedule.execution_order(waits)
    return {
        (before, after): _check_time(value, f"waits['{before}->{after}']") for (before, after), value in waits.items()
    }


def _check_actions(actions: frozenset[Action], named: Mapping[Action, Any], field: str) -> None:
    for action in named:
        if action not in actions:
            raise PlanInputError(f"{field}: {_show(str(action))} is not an action of the schedule")


def _check_bounds(action: Action, value: Any) -> Bounds:
    field = f"times['{action}']"
    if isinstance(value, Bounds):
        value = (value.lower, value.upper)
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise PlanInputError(f"{field}: {_show(value)} is not [all frozen, nothing frozen], two times in ms")
    lower, upper = (_check_time(time, f"{field}[{k}]") for k, time in enumerate(value))
    if lower > upper:
        raise PlanInputError(
            f"{field}: all frozen takes {lower:g} ms, more than nothing frozen, {upper:g} ms: min exceeds max"
        )
    return Bounds(lower, upper)


def _check_time(value: object, field: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number) or number < 0.0:
        raise PlanInputError(f"{field}: {_show(value)} is not a finite time in ms of at least 0")
    return number


def _check_learning(schedule: PipelineSchedule, learning: Learning | None) -> Learning | None:
    if learning is None:
        return None
    last = schedule.num_stages - 1
    for stage in learning.stages:
        if not 0 <= stage <= last:
            raise PlanInputError(f"learning.stages: {stage} is not a stage of the schedule: allowed are 0 to {last}")
    return learning.validate()


def _check_token_cost(cost: TokenCost | None) -> TokenCost | None:
    if cost is not None and not (0.0 <= cost.fixed < math.inf and 0.0 < cost.per_token < math.inf):
        raise PlanInputError(
            f"token_cost: [{cost.fixed:g}, {cost.per_token:g}] is not a share of a weight gradient's time from 0 and "
            "one above 0"
        )
    return cost


def _check_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise PlanInputError(f"{field}: {_show(value)} is not true or false")
    return value


def _check_count(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanInputError(f"{field}: {_show(value)} is not an integer of at least 0")
    return value


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_ranks(value: object) -> PipelineSchedule:
    if not isinstance(value, list) or not all(isinstance(rank, list) for rank in value):
        raise PlanInputError(f"ranks: {_show(value)} is not one list of actions per pipeline rank")
    actions = [
        [_read_action(text, f"ranks[{rank}][{slot}]") for slot, text in enumerate(texts)]
        for rank, texts in enumerate(value)
    ]
    try:
        return PipelineSchedule(tuple(map(tuple, actions))).validate()
    except ScheduleError as error:
        raise PlanInputError(f"ranks: {error}") from error


def _read_action(text: Any, field: str) -> Action:
    try:
        return Action.parse(text)
    except ScheduleError as error:
        raise PlanInputError(
            f"{field}: {_show(text)} is not an action: expected stage, one of F B I W, microbatch, like '2F0'"
        ) from error


def _read_edge(text: Any, field: str) -> tuple[Action, Action]:
    ends = text.split("->") if isinstance(text, str) else []
    if len(ends) != 2:
        raise PlanInputError(f"{field}: {_show(text)} is not an edge such as '0F0->1F0'")
    source, target = (_read_action(end, f"{field}[{_show(text)}]") for end in ends)
    return source, target


def _read_token_cost(value: object) -> TokenCost | None:
    if value is None:
        return None
    pair = value if isinstance(value, list) else ()
    fixed, per_token = map(_number, pair) if len(pair) == 2 else (None, None)
    if fixed is None or per_token is None:
        raise PlanInputError(f"token_cost: {_show(value)} is not [fixed, per token], two shares of a product's time")
    return TokenCost(fixed, per_token)


def _object(data: dict[str, Any], field: str) -> dict[str, Any]:
    value = data.get(field, {})
    if not isinstance(value, dict):
        raise PlanInputError(f"{field}: {_show(value)} is not an object")
    return value


def _show(value: object) -> str:
    return reprlib.repr(value)
