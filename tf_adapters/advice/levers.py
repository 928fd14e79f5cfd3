"""Predict the gain of each lever for a measured run: deferral, freezing, sampled tokens, another order, a new cut.

All predictions use the same measured times. Each is a step as ``planner.forecast`` computes it: the measured step less
the time by which the pipeline's part becomes shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tf_adapters.advice.balance import balance
from tf_adapters.errors import ConfigError, TimelyFreezeError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.token_cost import TokenCost
from tf_adapters.planner.forecast import forecast
from tf_adapters.planner.problem import Limits, PlanProblem
from tf_adapters.planner.solve import solve
from tf_adapters.report.page import Table
from tf_adapters.report.schema import Report
from tf_adapters.schedule.deferral import whole_microbatches_held
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.simulate.goal_comparison import MOST_ACTIONS, PAPER, WORTH_MEMORY
from tf_adapters.simulate.model_costs import action_bounds
from tf_adapters.simulate.named_schedules import Sizes, named_order
from tf_adapters.simulate.simulated_pipeline import carried_gaps, in_v, recut, stage_times
from tf_adapters.simulate.simulation_page import GRADIENTS, IN_V, held_text
from tf_adapters.simulate.sources import PROMISED

_MOST_DEFERRED = 4_096  # actions up to which an order with deferral takes a second or two
_DRAWING = TokenCost(fixed=0.1)
"""Assumed cost of sampling tokens without a measurement: a tenth of a weight gradient, for drawing and gathering."""

_SAMPLED = "{:.0%} of their time saved, unbiased"
_ORDERS = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv")


@dataclass(frozen=True, slots=True)
class Lever:
    """A lever and its predicted step."""

    name: str
    step_ms: float
    held: float  # the most that any rank keeps in memory, in microbatches of all of its layers
    gradients: str  # what becomes of the weight gradients, in words


@dataclass(frozen=True)
class Levers:
    """The measured step with nothing frozen, and the steps with each lever. ``notes`` name the assumptions."""

    now: Lever
    others: tuple[Lever, ...]
    notes: tuple[str, ...]


def levers(report: Report, progress: Callable[[str], None] | None = None) -> Levers:
    """Plan every lever that fits the run. ``progress`` is called with the name of each plan before it is made.

    Raises ConfigError where nothing was measured, and TimelyFreezeError as the planner does.
    """
    run = _Run(report, progress or (lambda _: None))
    notes = [*run.notes()]
    actions = len(run.schedule.actions)
    others = [*run.deferral()] if actions <= _MOST_DEFERRED else []
    if actions <= MOST_ACTIONS:
        others += run.freezing()
    else:
        notes.append(f"plans for {actions:,} actions take long: tf-adapters simulate makes those that are missing here")
    others += [*run.orders(), *run.cut()]
    return Levers(run.now(), tuple(others), tuple(notes))


def goal_lines(report: Report) -> list[str]:
    """Say what each goal would bring to a run with method "none", and what that assumes. Empty for many actions."""
    measured = report.config.get("method") == "none" and report.times
    if not measured or len(report.schedule.actions) > MOST_ACTIONS:
        return []
    try:
        run = _Run(report, lambda _: None)
        goals = [*run.deferral(), next(run.freezing())]
    except TimelyFreezeError as error:
        return [f"what the goals would bring is not known: {error}"]
    now = run.now()
    rows = [
        f"{goal.name}: planned {goal.step_ms:,.1f} ms a step, {_speedup(now, goal)}; weight gradients: {goal.gradients}"
        for goal in goals
    ]
    return [*rows, *run.assumption()]


class _Run:
    """A run's times, and the predicted steps."""

    def __init__(self, report: Report, progress: Callable[[str], None]) -> None:
        self._report, self._progress, known = report, progress, report.measurement
        self._costs, self._ratio = known.token_costs, report.max_freeze_ratio or PAPER
        self._assumed = not any(b.lower < b.upper for a, b in known.times.items() if a.freezable)
        times = _with_assumed_weights(known.times) if self._assumed else known.times
        step_ms = known.unfrozen_step_ms or known.span_ms
        self._known = replace(known, times=times, token_costs={}, unfrozen_step_ms=step_ms)
        self.schedule, self._step_ms = known.schedule, step_ms

    def now(self) -> Lever:
        return Lever("as it is, measured", self._step_ms, whole_microbatches_held(self.schedule), "all")

    def assumption(self) -> Iterator[str]:
        if self._assumed:
            yield (
                "what freezing saves was not measured (nothing was frozen): a weight gradient is taken to last "
                "as long as the forward, at most half of the backward"
            )

    def notes(self) -> Iterator[str]:
        yield from self.assumption()
        if not self._costs:
            yield "drawing tokens was not measured: it is taken to cost a tenth of a weight gradient"
        promised = self._report.measured.planned_step_ms
        if promised is not None and not self._assumed and self._report.plan and self._report.plan.mean_freeze_ratio:
            yield PROMISED.format(promised)

    # --- plans of the host's order -----------------------------------------------------------------------------

    def deferral(self) -> Iterator[Lever]:
        """Defer weight gradients and freeze nothing; also with more memory if that helps, and in a V. Fastest first."""
        exact = self._planned("goal exact", 0.0, GRADIENTS["exact"])
        more = len(self.schedule.ranks)
        roomy = self._planned(f"goal exact, extra_microbatches {more}", 0.0, GRADIENTS["exact"], extra=more)
        found = [exact, *([roomy] if roomy.step_ms < exact.step_ms - WORTH_MEMORY * self._step_ms else [])]
        if self._report.forwards_may_move and (cut := in_v(self._known)) is not None:
            found.append(self._in_v(cut))
        yield from sorted(found, key=lambda lever: (round(lever.step_ms, 6), lever.held))

    def _in_v(self, cut: Measurement) -> Lever:
        name = f"goal exact{IN_V}"
        self._progress(name)
        plan = solve(PlanProblem(cut, Limits.of_training(0.0, defer=True)))
        step = self._with_batch(plan.span_ms.planned - self._known.span_ms)
        return Lever(name, step, whole_microbatches_held(plan.schedule or cut.schedule), GRADIENTS["exact"])

    def freezing(self) -> Iterator[Lever]:
        """The goal that freezes, then frozen tensors and sampled tokens within the run's own limit."""
        yield self._planned("goal paper", PAPER, GRADIENTS["paper"], defer=False)
        limit = f", limit {self._ratio:g}"
        if self._ratio != PAPER:
            yield self._planned(f"freezing{limit}", self._ratio, GRADIENTS["paper"], defer=False)
        yield self._sampled(f"sampled tokens, deferred{limit}")
        yield self._sampled(f"sampled tokens{limit}", defer=False)
        yield self._planned(f"freezing, deferred{limit}", self._ratio, GRADIENTS["paper"])

    def _sampled(self, name: str, defer: bool = True) -> Lever:
        return self._planned(name, self._ratio, _SAMPLED, defer=defer, costs=self._costs or {0: _DRAWING})

    def _planned(
        self,
        name: str,
        ratio: float,
        gradients: str,
        *,
        defer: bool = True,
        extra: int = 0,
        costs: Mapping[int, TokenCost] | None = None,
    ) -> Lever:
        self._progress(name)
        moves = self._report.forwards_may_move
        limits = Limits.of_training(ratio, defer=defer, extra_microbatches=extra, moves_forwards=moves)
        plan = solve(PlanProblem(replace(self._known, token_costs=costs or {}), limits))
        promised = forecast(self._known, plan, stage_0_vanishes=not self._report.config.get("freeze_exclude"))
        held = whole_microbatches_held(plan.schedule or self.schedule)
        return Lever(name, promised.planned_ms, held, gradients.format(plan.mean_freeze_ratio))

    # --- other orders and other cuts -----------------------------------------------------------------------------

    def orders(self) -> Iterator[Lever]:
        """Other schedules of the same model on the same ranks, nothing frozen; where the sizes fit."""
        pieces = stage_times(self._known)
        sizes = Sizes(microbatches=self.schedule.num_microbatches, ranks=len(self.schedule.ranks))
        for name in _ORDERS:
            try:
                order = named_order(name, sizes)
                times = action_bounds(order, recut(pieces, order.num_stages), 1.0)
            except ConfigError:
                continue
            if order == self.schedule:
                continue
            other = Measurement(order, times, **carried_gaps(self._known, order)._asdict())
            each = order.num_stages // len(order.ranks)
            cut = f", {each} stages a rank" if each > 1 else ""
            step = self._with_batch(other.span_ms - self._known.span_ms)
            yield Lever(f"schedule {name}{cut}", step, whole_microbatches_held(order), "all")

    def cut(self) -> Iterator[Lever]:
        """Move layers to other stages, if that shortens the step."""
        try:
            result = balance(self._report)
        except TimelyFreezeError:
            return
        if result.moves:
            step = self._with_batch(result.best.makespan_ms - result.now.makespan_ms)
            yield Lever("layers moved (tf-adapters balance)", step, whole_microbatches_held(self.schedule), "all")

    def _with_batch(self, longer: float) -> float:
        """The measured step with a batch that is ``longer`` ms longer."""
        return max(0.0, self._step_ms + longer)


def _with_assumed_weights(times: Mapping[Action, Bounds]) -> dict[Action, Bounds]:
    """Weight gradients that last as long as the microbatch's forward on their stage, at most half of the backward.

    Those that the host computes apart were measured, except on the first stage, whose W is the whole backward.
    """

    def bounds(action: Action) -> Bounds:
        upper = times[action].upper
        forward, inputs = (times.get(replace(action, kind=kind)) for kind in (Kind.FORWARD, Kind.INPUT_GRAD))
        if not action.freezable or forward is None:
            return times[action]
        if action.kind is Kind.WEIGHT_GRAD and action.stage > 0 and inputs is not None:
            return Bounds(0.0, upper)
        return Bounds(upper - min(forward.upper, 0.5 * upper), upper)

    return {action: bounds(action) for action in times}


# --- as a table on the page of a run that only measures --------------------------------------------------------

_HEADER = ("", "step ms, planned", "speedup", "microbatches held", "weight gradients")


def _speedup(now: Lever, lever: Lever) -> str:
    return f"{now.step_ms / lever.step_ms if lever.step_ms > 0.0 else 1.0:.2f}x"


def levers_table(found: Levers) -> Table:
    """A row for the measured step, then one for each lever."""
    rows = tuple(
        (
            lever.name,
            f"{lever.step_ms:,.1f}",
            _speedup(found.now, lever),
            held_text(lever.held),
            lever.gradients,
        )
        for lever in (found.now, *found.others)
    )
    return Table("What each would bring, planned from the times of this run", _HEADER, rows)
