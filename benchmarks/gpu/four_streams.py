"""One process drives four streams of one GPU, each with a quarter of the SMs. Used if MPS does not start.

Kernels are real, and so are their durations. The engine is not the host's: this process queues the actions of all
ranks, in the order of 1F1B and in the orders that ``tf-adapters plan --defer`` makes of the measured times. Events make
a stage wait for its neighbour's result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.gpu.parts import Check, Options
from benchmarks.gpu.pipeline import LLAMA_1B, TINY, Stage, mean_square, smaller
from benchmarks.gpu.quarters import green_streams
from tf_adapters.measuring.timer import clock_for
from tf_adapters.planner.solve import plan_from_json
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import one_forward_one_backward

RANKS = 4
EXTRA = {"exact": 0, "exact, 2 microbatches more": 2, "exact, 4 microbatches more": 4}
Rows = Sequence[Sequence[Action]]
Key = tuple[str, int, int]
"""What an action makes ("output", "gradient" or "weights"), its stage and its microbatch."""


class FourStages:
    """The stages of all ranks, each with its stream, and what is in flight."""

    def __init__(self, options: Options) -> None:
        self.options, self.size = options, smaller(TINY if options.tiny else LLAMA_1B, 4)
        self._device, self._clock = options.target(), clock_for(options.target())
        dtype = torch.bfloat16 if options.cuda else torch.float32
        self._streams: list[Any] = green_streams(RANKS) if options.cuda else [None] * RANKS
        with self._device:
            self.stages = [Stage(self.size).to(dtype) for _ in range(RANKS)]
            whole = (self.size.microbatches, self.size.rows, self.size.context, self.size.width)
            self._inputs = torch.randn(whole).to(dtype)
        self._values: dict[Key, Any] = {}
        self._done: dict[Key, Any] = {}
        self.ms: dict[Action, list[float]] = {}

    def batch(self, rows: Rows, timed: bool = False) -> float:
        """Run a batch and return its time in ms. ``timed`` also times each action."""
        self._values.clear()
        self._done.clear()
        marks = []
        self._clock.synchronize()
        begin = self._clock.mark()
        for action in queue_order(rows):
            with self._on_stream(action.stage):
                self._after(needed(action, RANKS))
                start = self._clock.mark()
                self._compute(action)
                marks.append((action, start, self._clock.mark()))
                self._done[result(action)] = self._recorded()
        self._clock.synchronize()
        if timed:
            for action, start, end in marks:
                self.ms.setdefault(action, []).append(self._clock.elapsed_ms(start, end) or 0.0)
        return max(self._clock.elapsed_ms(begin, end) or 0.0 for _, _, end in marks)

    def gradients(self) -> list[torch.Tensor]:
        """Return copies of all gradients, and clear them."""
        found = [p.grad.clone() for stage in self.stages for p in stage.parameters() if p.grad is not None]
        for stage in self.stages:
            stage.zero_grad()
        return found

    def _on_stream(self, stage: int) -> Any:
        return torch.cuda.stream(self._streams[stage]) if self.options.cuda else nullcontext()

    def _recorded(self) -> Any:
        if not self.options.cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _after(self, key: Key | None) -> None:
        event = None if key is None else self._done[key]
        if event is not None:
            event.wait()

    def _compute(self, action: Action) -> None:
        stage, number, values = action.stage, action.microbatch, self._values
        parameters = self.stages[stage].parameters()
        if action.kind is Kind.FORWARD:
            given = self._inputs[number] if stage == 0 else values["output", stage - 1, number].detach()
            given = given.detach().requires_grad_()
            output = self.stages[stage](given)
            values["input", stage, number], values["output", stage, number] = given, output
        elif action.kind is Kind.WEIGHT_GRAD:
            stage_backward_weight(parameters, values.pop(("weights", stage, number)))
        else:
            output, above = values["output", stage, number], values.get(("gradient", stage + 1, number))
            if stage == RANKS - 1:
                output = mean_square(output, self._inputs[number])
            given = values["input", stage, number]
            above = None if above is None else [above]
            if action.kind is Kind.INPUT_GRAD:
                gradients, groups = stage_backward_input([output], above, [given], parameters)
                values["gradient", stage, number], values["weights", stage, number] = gradients[0], groups
            else:
                torch.autograd.backward([output], above)
                values["gradient", stage, number] = given.grad


def result(action: Action) -> Key:
    """Return what an action makes."""
    names = {Kind.FORWARD: "output", Kind.WEIGHT_GRAD: "weights"}
    return names.get(action.kind, "gradient"), action.stage, action.microbatch


def needed(action: Action, stages: int) -> Key | None:
    """Return the result of another stage that an action uses; None if it uses none."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return "output", action.stage - 1, action.microbatch
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and action.stage < stages - 1:
        return "gradient", action.stage + 1, action.microbatch
    return None


def queue_order(rows: Rows) -> Iterator[Action]:
    """Yield the actions of all ranks in turn, each after what it needs."""
    todo = [list(reversed(row)) for row in rows]
    made: set[Key | None] = {None}
    while any(todo):
        for row in todo:
            if row and needed(row[-1], len(rows)) in made:
                action = row.pop()
                made.add(result(action))
                yield action


def split(rows: Rows) -> list[list[Action]]:
    """Return the order with each B as an I and a W right after it, to time both."""
    parts: list[list[Action]] = []
    for row in rows:
        parts.append([])
        for action in row:
            both = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if action.kind is Kind.BACKWARD else (action.kind,)
            parts[-1] += [Action(action.stage, kind, action.microbatch) for kind in both]
    return parts


def run(options: Options) -> Iterator[Check]:
    """Run 1F1B and its deferred orders in rotation, and compare gradients to the bit."""
    four = FourStages(options)
    host = one_forward_one_backward(RANKS, four.size.microbatches)
    repeats = 3 if options.tiny else 30
    for _ in range(3 if options.tiny else 10):
        four.batch(split(host.ranks), timed=True)
        four.gradients()
    plans = planned(host, four.ms)
    orders: dict[str, Rows] = {"1F1B": host.ranks, **{name: rows_of(plan) for name, plan in plans.items()}}
    times: dict[str, list[float]] = {name: [] for name in orders}
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(repeats):
        for name, rows in orders.items():
            times[name].append(four.batch(rows))
            found[name] = four.gradients()
    yield Check("four streams, 1F1B: batch", statistics.median(times["1F1B"]), "ms")
    for name, plan in plans.items():
        ms = statistics.median(times[name])
        pairs = zip(times["1F1B"], times[name], strict=True)
        same = all(torch.equal(*pair) for pair in zip(found[name], found["1F1B"], strict=True))
        yield Check(f"four streams, {name}: batch", ms, "ms")
        yield Check(f"four streams, {name}: speed", statistics.median(alone / ours for alone, ours in pairs), "x")
        yield Check(f"four streams, {name}: measured over planned", ms / plan["makespan_ms"]["planned"])
        yield Check(f"four streams, {name}: gradients of 1F1B, to the bit", float(same))


def planned(host: PipelineSchedule, ms: dict[Action, list[float]]) -> dict[str, Any]:
    """Return a plan for each amount of memory, from the measured times."""
    times = {}
    for action in host.actions:
        apart = [action]
        if action.kind is Kind.BACKWARD:
            apart = [Action(action.stage, kind, action.microbatch) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)]
        parts = [statistics.median(ms[part]) for part in apart]
        times[str(action)] = [parts[0], sum(parts)]
    rows = [[str(action) for action in row] for row in host.ranks]
    given = {"ranks": rows, "times": times, "max_freeze_ratio": 0.0, "defer": True}
    return {name: plan_from_json({**given, "extra_microbatches": extra}).to_json() for name, extra in EXTRA.items()}


def rows_of(plan: dict[str, Any]) -> list[list[Action]]:
    """Return the order of a plan."""
    return [[Action.parse(text) for text in row] for row in plan["ranks"]]
