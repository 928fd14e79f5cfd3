"""Pipelines from the command line's options: from recorded times, given times of stages, or a model's FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.transfers import NO_GAPS, Gaps
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.report.schema import Report
from tf_adapters.schedule.deferral import most_in_flight
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.simulate.model_costs import SHAPES, StageCost, action_bounds, split_layers, stage_costs
from tf_adapters.simulate.named_schedules import Sizes, named_order, read_csv
from tf_adapters.simulate.options import Options
from tf_adapters.simulate.simulated_pipeline import Pipeline, between_ranks, carried_gaps, recut, stage_times

_FLOPS_PER_MS = 1e9  # of 1 TFLOP/s
_DEFAULT_RATIO = 0.8
PROMISED = (
    "the run's own plan promises {:,.1f} ms: it runs each monitored step again, in which actions now and then "
    "take longer; here every action takes its median"
)

Costs = Callable[[PipelineSchedule], Sequence[StageCost]]


@dataclass(frozen=True)
class Request:
    """A request for a simulation: pipelines, r_max for all of them, the source of the times in words, and notes.

    ``step_ms`` is the measured time of a whole step of the first pipeline with nothing frozen.
    ``extra_microbatches`` is None without deferral.
    """

    pipelines: tuple[Pipeline, ...]
    max_freeze_ratio: float
    source: str
    notes: tuple[str, ...] = ()
    step_ms: float | None = None
    extra_microbatches: int | None = None


def read_request(options: Options, load: Callable[[str], Any]) -> Request:
    """Return the pipelines for ``options``; ``load`` reads a JSON file. Raises ConfigError and PlanInputError."""
    if options.report is not None:
        request = _from_recorded(options, _from_report(options.report))
    elif options.input is not None:
        request = _from_recorded(options, _from_input(options.input, load(options.input)))
    else:
        source, costs_for = _assumed(options)
        pipelines = _compared(options, options.sizes, costs_for, lambda order: NO_GAPS)
        request = Request(pipelines, _DEFAULT_RATIO, source)
    ratio, extra = options.max_freeze_ratio, options.extra_microbatches
    pipelines = request.pipelines
    if options.steps is not None:
        pipelines = tuple(Pipeline(p.name, replace(p.measurement, steps=options.steps)) for p in pipelines)
    return replace(
        request,
        pipelines=pipelines,
        max_freeze_ratio=request.max_freeze_ratio if ratio is None else ratio,
        extra_microbatches=request.extra_microbatches if extra is None else extra,
        notes=(*request.notes, *_notes(request.pipelines, options.sizes.stages)),
    )


# --- recorded times ------------------------------------------------------------------------------------------


def _from_report(path: str) -> Request:
    report = Report.read(path)
    try:
        known = report.measurement
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    promised = report.measured.planned_step_ms
    return Request(
        (Pipeline("recorded", replace(known, token_costs={})),),
        _DEFAULT_RATIO if report.max_freeze_ratio is None else report.max_freeze_ratio,
        source=f"measured on {report.host.name}, {path}",
        extra_microbatches=_recorded_extra(report),
        step_ms=report.measured.step_ms_unfrozen,
        notes=() if promised is None else (PROMISED.format(promised),),
    )


def _recorded_extra(report: Report) -> int | None:
    extra = report.config.get("extra_microbatches", 0)
    deferred = report.config.get("weight_gradients") == "deferred"
    if extra == "auto":
        order, host = report.plan and report.plan.schedule, report.schedule
        extra = max(0, most_in_flight(order) - most_in_flight(host)) if order else 0
    return extra if deferred and isinstance(extra, int) else None


def _from_input(path: str, data: Any) -> Request:
    problem = PlanProblem.from_json(data)
    source = "given on standard input" if path == "-" else f"given in {path}"
    return Request(
        (Pipeline("as given", replace(problem.measurement, token_costs={})),),
        problem.limits.max_freeze_ratio,
        source=source,
        extra_microbatches=problem.limits.extra_microbatches if problem.limits.defer else None,
    )


def _from_recorded(options: Options, recorded: Request) -> Request:
    """Return the recorded schedule, and after it others with the mean times of its stages."""
    (original,), sizes = recorded.pipelines, options.sizes
    if sizes.stages is not None:
        raise ConfigError(
            f"--stages {sizes.stages}: recorded times have their stages ({original.schedule.num_stages});"
            " --ranks says on how many ranks another schedule runs"
        )
    if options.communication_ms is not None:
        gaps = between_ranks(original.schedule, options.communication_ms)
        original = Pipeline(original.name, replace(original.measurement, **gaps._asdict()))
    pieces = stage_times(original.measurement)
    filled = replace(
        sizes,
        ranks=sizes.ranks or len(original.schedule.ranks),
        microbatches=sizes.microbatches or original.schedule.num_microbatches,
    )
    others = _compared(
        options, filled, lambda order: recut(pieces, order.num_stages), partial(carried_gaps, original.measurement)
    )
    others = tuple(Pipeline(other.name, _between_steps(other.measurement, original.measurement)) for other in others)
    if not options.schedules and sizes != Sizes():
        raise ConfigError("--ranks, --microbatches: the recorded schedule has its own; add --schedule for another")
    recut_note = ("the other schedules take the recorded mean times and gaps, stages cut into equal parts or joined",)
    notes = (*recorded.notes, *(recut_note if others else ()))
    return replace(recorded, pipelines=(original, *others), notes=notes)


def _between_steps(other: Measurement, recorded: Measurement) -> Measurement:
    """Return the measurement of another schedule with the recorded times between steps."""
    between = {rank: ms for rank, ms in recorded.between_steps.items() if rank < len(other.schedule.ranks)}
    return replace(other, steps=recorded.steps, between_steps=between)


# --- assumed times -------------------------------------------------------------------------------------------


def _assumed(options: Options) -> tuple[str, Costs]:
    if not options.schedules and options.csv is None:
        raise ConfigError("--schedule: missing: in which order actions run (or --csv)")
    if options.csv is not None and not options.schedules and replace(options.sizes, stages=None) != Sizes():
        raise ConfigError("--ranks, --microbatches, --stages-per-rank: the file of --csv says them")
    return _stage_source(options) if options.model is None else _model_source(options, options.model)


def _model_source(options: Options, model: str) -> tuple[str, Costs]:
    shape = SHAPES[model]

    def costs(order: PipelineSchedule) -> tuple[StageCost, ...]:
        try:
            layers = split_layers(shape.num_hidden_layers, order.num_stages)
        except ValueError as error:
            raise ConfigError(f"--model {model}: {error}") from None
        rate = options.tflops * _FLOPS_PER_MS
        return tuple(
            StageCost(cost.forward / rate, cost.input_grad / rate, cost.weight_grad / rate)
            for cost in stage_costs(shape, layers, options.sequences, options.length)
        )

    size = f"{options.sequences} x {options.length} tokens a microbatch"
    return f"{model}'s FLOPs at {options.tflops:g} TFLOP/s, {size}", costs


def _stage_source(options: Options) -> tuple[str, Costs]:
    sizes = options.sizes
    count = sizes.stages or sizes.ranks

    def costs(order: PipelineSchedule) -> tuple[StageCost, ...]:
        pieces = count or order.num_stages
        forward = _for_each("--forward-ms", options.forward_ms or (), pieces, sizes)
        backward = _for_each("--backward-ms", options.backward_ms, pieces, sizes)
        weight = _for_each("--weight-share", options.weight_share, pieces, sizes)
        return recut(
            [StageCost(f, b * (1.0 - w), b * w) for f, b, w in zip(forward, backward, weight, strict=True)],
            order.num_stages,
        )

    return "given for each " + ("stage" if sizes.stages or not sizes.ranks else "rank"), costs


def _for_each(argument: str, values: tuple[float, ...], pieces: int, sizes: Sizes) -> tuple[float, ...]:
    if len(values) == 1:
        return values * pieces
    if len(values) != pieces:
        what = f"--stages {sizes.stages}" if sizes.stages else f"--ranks {sizes.ranks}" if sizes.ranks else "the stages"
        raise ConfigError(f"{argument}: {len(values)} values: expected one, or {pieces} for {what}")
    return values


# --- the same for every source -------------------------------------------------------------------------------


def _compared(
    options: Options, sizes: Sizes, costs_for: Costs, gaps_for: Callable[[PipelineSchedule], Gaps]
) -> tuple[Pipeline, ...]:
    """Return a pipeline for --csv, then one for each name in --schedule. --communication-ms replaces their gaps."""
    orders: list[tuple[str, PipelineSchedule]] = []
    if options.csv is not None:
        orders.append((options.csv, read_csv(options.csv)))
    orders += [(name, named_order(name, sizes)) for name in options.schedules]
    delay = options.communication_ms

    def pipeline(name: str, order: PipelineSchedule) -> Pipeline:
        gaps = gaps_for(order) if delay is None else between_ranks(order, delay)
        return Pipeline(name, Measurement(order, action_bounds(order, costs_for(order), 1.0), **gaps._asdict()))

    return tuple(pipeline(name, order) for name, order in orders)


def _notes(pipelines: Sequence[Pipeline], stages: int | None) -> tuple[str, ...]:
    other = [
        f"{pipeline.name} runs {pipeline.schedule.num_stages} stages on {len(pipeline.schedule.ranks)} ranks,"
        f" not {stages}: the model is cut anew"
        for pipeline in pipelines
        if stages not in (None, pipeline.schedule.num_stages)
    ]
    ranks = {len(pipeline.schedule.ranks) for pipeline in pipelines}
    if len(ranks) > 1:
        counts = ", ".join(map(str, sorted(ranks)))
        other.append(f"these run on different numbers of ranks ({counts}): give --ranks to compare on the same")
    return tuple(other)
