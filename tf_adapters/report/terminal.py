"""A report as a page: the gain from freezing, overall and for each stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tf_adapters.planner.deferred import describe_deferral
from tf_adapters.planner.freeze_plan import Makespan
from tf_adapters.report.batch import batch_facts, bubble_headline
from tf_adapters.report.layout import Panel, stable_samples
from tf_adapters.report.page import Page, Table
from tf_adapters.report.schema import Batches, Report, SampledTokens
from tf_adapters.schedule.deferral import backward_of
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.training.batch_words import milliseconds as _ms

_NOTHING = "-"
_NO_GAIN = 1.005  # the largest speedup that is called none
_SAME_PACE = 0.03  # a smaller change of pace is not mentioned
_HEADER = (
    *("stage", "rank", "planned to skip", "really skipped"),
    *("backward ms, nothing skipped", "backward ms, stable"),
)
_STATUS = {
    "warmup": "warming up: nothing is measured or changed yet",
    "monitoring": "monitoring: timing the steps",
    "planning": "planning: all times are measured; the plan is being made while training goes on",
    "planned": "planned: the plan starts with the next step",
    "progressive": "progressive freezing: the shares rise step by step to the plan's",
    "stable": "stable freezing: the plan is in force",
    "disabled": "disabled: the host trains as if tf-adapters were not there",
    "failed": "failed: the notes below say why",
}
_TABLE_TITLE = "Share of each stage's weight gradients that is skipped (backward: per microbatch)"


def page(report: Report, panels: Sequence[Panel] = ()) -> Page:
    rows = _rows(report) if report.freezes and not _only_measures(report) else ()
    tables = (Table(_TABLE_TITLE, _HEADER, rows),) if rows else ()
    return Page(_headline(report), tuple(_facts(report)), tables=tables, panels=tuple(panels), notes=_remarks(report))


def _headline(report: Report) -> str:
    measured = report.measured
    if _only_measures(report) and (headline := bubble_headline(report)):
        return headline
    unfrozen, stable = measured.step_ms_unfrozen, measured.step_ms_stable
    if stable is not None:
        return f"step {_ms(stable)}: {report.speed}"
    if unfrozen is None:
        return "step time not measured yet"
    wait = "not run" if report.status in ("disabled", "failed") else "still to be measured"
    promise = f"{_ms(measured.planned_step_ms)} planned, " if measured.planned_step_ms else ""
    baseline, steps = (" with nothing frozen", "freezing") if report.freezes else ("", "steps")
    return f"step {_ms(unfrozen)}{baseline} while monitoring; {promise}stable {steps} {wait}"


def _facts(report: Report) -> Iterable[tuple[str, str]]:
    yield "status", f"{_status(report)} (step {report.step}{_phase_ends(report)})"
    host, schedule = report.host, report.schedule
    size = f"{schedule.num_stages} stages on {len(schedule.ranks)} ranks, {schedule.num_microbatches} microbatches"
    yield "pipeline", f"{host}: {size}"
    yield from batch_facts(report)
    if not _only_measures(report):
        yield from _plan_facts(report)
    memory = report.measured.peak_memory_bytes
    if memory.unfrozen:
        peaks = " -> ".join(_gib(max(of_ranks)) for of_ranks in (memory.unfrozen, memory.stable) if of_ranks)
        counted = "allocated by the process" if host.emulated or host.device == "cpu" else "of tensors"
        planned = f", at most {_gib(max(memory.planned))} planned" if memory.planned else ""
        yield "memory", f"peak {counted} on the fullest rank {peaks}{planned}"
    if report.compilations:
        first, later = (report.compilations.get(part, 0) for part in ("first_step", "later"))
        yield "compiler", f"{first} graphs up to the first step, {later} later"


def _status(report: Report) -> str:
    if report.status == "stable" and _only_measures(report):
        return "measured: the host trains as if tf-adapters were not there"
    if report.status == "stable" and report.plan is None:
        return "freezing what is stable, without a plan"
    if report.status == "stable" and not report.freezes:
        return "stable: the plan is in force"
    return _STATUS[report.status]


def _plan_facts(report: Report) -> Iterable[tuple[str, str]]:
    plan, schedule = report.plan, report.schedule
    if plan is None:
        yield "plan", "none yet" if report.status in ("warmup", "monitoring") else "none"
    else:
        spans = plan.span_ms
        name, what = ("batch", "pipeline computation") if plan.period_ms is None else ("period", "steps overlap:")
        yield name, f"{what} {_spans(report, spans)}"
        if plan.deferrable_share:
            yield "deferral", describe_deferral(plan, schedule)
        if report.freezes:
            limit = report.max_freeze_ratio
            bound = "" if limit is None else f", limit {limit:.0%} per stage"
            yield "plan", f"skip {plan.mean_freeze_ratio:.0%} of the weight gradients on average{bound}"
        if report.tokens:
            yield "tokens", _tokens(report.tokens.values())
        solver = plan.solver
        gap = f"at most {solver.optimality_gap:.2%} from the best possible"
        yield "solver", f"{solver.name}, {solver.status.value.lower()} in {solver.seconds:.2f} s: {gap}"
    if report.batches:
        yield "batches", _batches(report.batches)
    pace = report.measured.forward_pace
    if pace and abs(pace - 1.0) >= _SAME_PACE:
        still = ", which do not freeze," if report.freezes else ""
        yield "pace", f"forwards{still} take {pace:.2f}x what they took while monitoring"


def _spans(report: Report, spans: Makespan) -> str:
    """The batch or the period in the host's order, with weight gradients deferred, as planned and all frozen."""
    deferred = spans.host is not None and report.has_own_order
    host = f"{_ms(spans.host if deferred and spans.host else spans.unfrozen)} in the host's order"
    if not report.freezes:
        return f"{host}, {_ms(spans.planned)} planned"
    unfrozen = f"{_ms(spans.unfrozen)} nothing frozen"
    if deferred:
        unfrozen = f"{host}, {_ms(spans.unfrozen)} with weight gradients deferred"
    return f"{unfrozen}, {_ms(spans.planned)} planned, {_ms(spans.fully_frozen)} everything frozen"


def _batches(batches: Mapping[str, Batches]) -> str:
    planned = ", ".join(
        f"{number} microbatches {_ms(of.planned_step_ms)} in {of.steps} steps" for number, of in batches.items()
    )
    return f"planned: {planned}; all other lines are for the number that most steps had"


def _tokens(stages: Collection[SampledTokens]) -> str:
    kept, fixed = [stage.kept for stage in stages], [stage.fixed for stage in stages]
    return (
        f"weight gradients of {min(kept):.0%} to {max(kept):.0%} of a stage's tokens; drawing them takes "
        f"{min(fixed):.0%} to {max(fixed):.0%} of the whole weight gradient's time"
    )


def _phase_ends(report: Report) -> str:
    phases = report.phases.named()[: 3 if report.freezes and not _only_measures(report) else 2]
    known = [f"{name} {step}" for name, step in phases if step is not None]
    return f"; last step of {', '.join(known)}" if known else ""


def _rows(report: Report) -> tuple[tuple[str, ...], ...]:
    if not report.times and report.plan is None:
        return ()
    schedule, stable = report.schedule, _whole_backwards(report)
    upper = {action: bounds[1] for action, bounds in report.times.items()}
    planned = {str(stage): ratio for stage, ratio in report.plan.stage_freeze_ratio.items()} if report.plan else {}
    rows = []
    for stage in sorted({action.stage for action in schedule.actions}):
        backwards = [a for a in schedule.actions if a.stage == stage and a.kind is not Kind.FORWARD]
        texts = [str(action) for action in backwards]
        freezable = [str(action) for action in backwards if action.freezable]
        # Input-gradient halves cannot be frozen and may go unreported: they keep their time.
        kept = {text: upper[text] for text in texts if text in upper and text not in freezable}
        count = len({action.microbatch for action in backwards})
        rows.append(
            (
                str(stage),
                str(schedule.rank_of(stage)),
                _share(planned.get(str(stage))),
                _share(report.measured.mean_afr.get(str(stage))),
                _per_microbatch(texts, upper, count),
                _per_microbatch(texts, {**kept, **stable}, count),
            )
        )
    return tuple(rows)


def _whole_backwards(report: Report) -> dict[str, float]:
    """Measured ms of each backward that the report has times of. A deferred backward is the sum of its halves."""
    measured: dict[str, float] = {}
    for text, sample in stable_samples(report).items():
        action = Action.parse(text)
        name = text if text in report.times else str(backward_of(action))
        measured[name] = measured.get(name, 0.0) + sample.ms
    return measured


def _per_microbatch(actions: list[str], times: dict[str, float], microbatches: int) -> str:
    if not actions or any(action not in times for action in actions):
        return _NOTHING
    return f"{sum(times[action] for action in actions) / microbatches:.1f}"


def _remarks(report: Report) -> tuple[str, ...]:
    speedup = report.measured.speedup
    if speedup is None or speedup > _NO_GAIN or not report.freezes:
        return report.note
    return ("freezing has not made the step faster", *report.note)


def _only_measures(report: Report) -> bool:
    return report.config.get("method") == "none"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
