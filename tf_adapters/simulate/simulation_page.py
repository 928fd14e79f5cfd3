"""Simulations as a page for the terminal: one in detail, several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tf_adapters.report.layout import Panel
from tf_adapters.report.page import Page, Table
from tf_adapters.schedule.ir import Action
from tf_adapters.simulate.simulation import Gain, GoalPoint, Simulation

GRADIENTS = {"exact": "all, the same bits", "paper": "{:.0%} skipped"}
"""Words for what becomes of the weight gradients, by goal; the number is the plan's mean freeze ratio."""

_STEPS = 8  # most parts of a critical path that are printed


def simulation_page(
    simulation: Simulation, source: str, notes: Sequence[str], width: int, step_ms: float | None = None
) -> Page:
    """One simulation in detail. ``width`` is a line's length in characters, ``step_ms`` a measured whole step."""
    schedule = simulation.pipeline.schedule
    stages, ranks = _count(schedule.num_stages, "stage"), _count(len(schedule.ranks), "rank")
    size = f"{stages} on {ranks}, {_count(schedule.num_microbatches, 'microbatch')}"
    tables = []
    if simulation.goals:
        tables.append(Table("What each goal would bring", _GOALS, tuple(map(_goal_row, simulation.goals))))
    tables += [_rank_table(simulation), _ratio_table(simulation, width)]
    if simulation.sweep:
        tables.append(_sweep_table(simulation))
    facts = [("times", source), *_facts(simulation)]
    if step_ms is not None:  # as planner.forecast.forecast: the part that is no pipeline computation stays as measured
        expected = step_ms - (simulation.unfrozen.end_ms - simulation.gain.stable_ms)
        facts.append(
            ("step", f"{_ms(step_ms)} measured with nothing frozen, {_ms(expected)} expected in stable freezing")
        )
    return Page(
        headline=f"{simulation.pipeline.name}: {size}: {_span(simulation)} {_ms(simulation.unfrozen.end_ms)}"
        f" -> {_ms(simulation.gain.ms)} at r_max {simulation.max_freeze_ratio:g}, {_percent(simulation.gain.gain)}",
        facts=tuple(facts),
        tables=tuple(tables),
        panels=simulation.panels,
        notes=tuple(notes),
    )


def comparison_page(simulations: Sequence[Simulation], source: str, notes: Sequence[str]) -> Page:
    ratio = simulations[0].max_freeze_ratio
    best = min(simulations, key=lambda simulation: simulation.gain.ms)
    title = f"{_span(simulations[0]).capitalize()} at r_max {ratio:g}"
    tables = [Table(title, _COMPARED, tuple(map(_compared, simulations)))]
    if simulations[0].sweep:
        tables.append(_sweeps_table(simulations))
    return Page(
        headline=f"{len(simulations)} schedules at r_max {ratio:g}: {best.pipeline.name} ends first,"
        f" {_ms(best.unfrozen.end_ms)} -> {_ms(best.gain.ms)}",
        facts=(("times", source), ("gain", _GAIN), ("at most", _MOST + _bound(simulations[0])), ("stable", _STABLE)),
        tables=tuple(tables),
        panels=planned_panels(simulations),
        notes=tuple(notes),
    )


def _span(simulation: Simulation) -> str:
    """Return the name of the pipeline's part of a step."""
    return "period" if simulation.unfrozen.overlap else "batch"


def _bound(simulation: Simulation) -> str:
    """Return what limits "at most": a deferred plan moves forwards too, and can be better."""
    return " without deferral" if simulation.exact else ""


def chart_panels(simulations: Sequence[Simulation]) -> tuple[Panel, ...]:
    """Each simulation's panels before and after; their titles have its name if there are several."""
    if len(simulations) == 1:
        return simulations[0].panels
    return tuple(replace(p, title=f"{each.pipeline.name}, {p.title}") for each in simulations for p in each.panels)


def planned_panels(simulations: Sequence[Simulation]) -> tuple[Panel, ...]:
    """The planned batch of each simulation; the title has its name."""
    return tuple(replace(each.planned, title=f"{each.pipeline.name}, {each.planned.title}") for each in simulations)


_GAIN = "in throughput, over the same schedule with nothing frozen"
_EXACT = "weight gradients deferred, nothing frozen, the same bits"
_MOST = "with everything frozen, which no r_max can beat"
_STABLE = "where all of stage 0 is frozen its backward is gone, also where the plan does not count on it"
IN_V = ", placement v (ZBV on torch)"
_GOALS = ("goal", "planned", "gain", "microbatches held", "weight gradients")
_COMPARED = (
    *("schedule", "ranks", "stages", "nothing frozen", "planned", "gain"),
    *("bubble", "skipped", "stable gain", "at most", "held by"),
)


def _compared(simulation: Simulation) -> tuple[str, ...]:
    schedule, gain = simulation.pipeline.schedule, simulation.gain
    return (
        simulation.pipeline.name,
        str(len(schedule.ranks)),
        str(schedule.num_stages),
        *(_ms(simulation.unfrozen.end_ms), _ms(gain.ms), _percent(gain.gain)),
        f"{simulation.unfrozen.bubble:.0%} -> {simulation.planned.bubble:.0%}",
        f"{simulation.plan.mean_freeze_ratio:.0%}",
        *(_percent(gain.stable_gain), _percent(simulation.most.gain)),
        str(simulation.holder),
    )


def _facts(simulation: Simulation) -> Iterator[tuple[str, str]]:
    unfrozen, planned, holder = simulation.unfrozen, simulation.planned, simulation.holder
    mean = simulation.plan.mean_freeze_ratio
    yield "before", f"{_ms(unfrozen.end_ms)}, bubble {unfrozen.bubble:.1%}"
    if simulation.exact:
        yield "exact", f"{_ms(simulation.exact.end_ms)}, {_percent(simulation.exact_gain)} throughput: {_EXACT}"
    yield "planned", f"{_gain(simulation.gain)}, bubble {planned.bubble:.1%}, {mean:.0%} of weight gradients skipped"
    if _differs(simulation.gain):
        yield "stable", f"{_stable(simulation.gain)}: {_STABLE}"
    most = simulation.most
    best = f"{_stable(most)} throughput, stable," if _differs(most) else _gain(most)
    yield "at most", f"{best} at any r_max{_bound(simulation)}, held by {holder}: {holder.share:.0%} of a critical path"
    yield "path before", _path(unfrozen)
    yield "path planned", _path(planned)


def _rank_table(simulation: Simulation) -> Table:
    before, after = simulation.unfrozen, simulation.planned
    rows = [
        (
            str(rank),
            ", ".join(map(str, stages)) or "-",
            *(f"{before.busy_ms[rank]:,.1f}", f"{before.bubbles[rank]:.0%}"),
            *(f"{after.busy_ms[rank]:,.1f}", f"{after.bubbles[rank]:.0%}"),
        )
        for rank, stages in enumerate(before.stages)
    ]
    header = ("rank", "stages", "busy ms before", "bubble", "busy ms planned", "bubble")
    return Table("Ranks", header, tuple(rows))


def _ratio_table(simulation: Simulation, width: int) -> Table:
    """A column per microbatch in percent; where that is too wide, one digit per microbatch."""
    stages = sorted(simulation.plan.stage_freeze_ratio)
    microbatches = simulation.pipeline.schedule.num_microbatches
    ratios = simulation.plan.ratio_of_microbatch
    means = {stage: f"{100 * simulation.plan.stage_freeze_ratio[stage]:.0f}" for stage in stages}
    if 12 + 5 * microbatches <= width:
        rows = [(str(s), means[s], *(f"{100 * ratios[s, m]:.0f}" for m in range(microbatches))) for s in stages]
        header = ("stage", "mean", *map(str, range(microbatches)))
        return Table("Freeze ratio by stage and microbatch, %", header, tuple(rows))
    rows = [(str(s), means[s], "".join(_digit(ratios[s, m]) for m in range(microbatches))) for s in stages]
    title = "Freeze ratio by stage, %, and by microbatch, a character each: . nothing, 1 to 9 tenths, # everything"
    return Table(title, ("stage", "mean", f"microbatches 0 to {microbatches - 1}"), tuple(rows))


def _digit(ratio: float) -> str:
    tenths = round(10 * ratio)
    return "." if tenths == 0 else "#" if tenths == 10 else str(tenths)


def _goal_row(point: GoalPoint) -> tuple[str, ...]:
    extra = f", extra_microbatches {point.extra_microbatches}" if point.extra_microbatches else ""
    extra += IN_V if point.placement == "v" else ""
    return (
        f"{point.goal}{extra}",
        *(_ms(point.batch.ms), _percent(point.batch.gain)),
        held_text(point.held),
        GRADIENTS[point.goal].format(point.mean_freeze_ratio),
    )


def _sweep_table(simulation: Simulation) -> Table:
    rows = [
        (
            f"{point.max_freeze_ratio:g}",
            *(_ms(point.batch.ms), _percent(point.batch.gain)),
            *(_ms(point.batch.stable_ms), _percent(point.batch.stable_gain)),
            f"{point.mean_freeze_ratio:.0%}",
        )
        for point in simulation.sweep
    ]
    return Table("Other r_max", ("r_max", "planned", "gain", "stable", "gain", "skipped"), tuple(rows))


def _sweeps_table(simulations: Sequence[Simulation]) -> Table:
    """A column per schedule."""
    rows = [
        (f"{points[0].max_freeze_ratio:g}", *(f"{_ms(p.batch.ms)} {_percent(p.batch.gain)}" for p in points))
        for points in zip(*(simulation.sweep for simulation in simulations), strict=True)
    ]
    names = (simulation.pipeline.name for simulation in simulations)
    return Table("Planned, and its gain, at other r_max", ("r_max", *names), tuple(rows))


def _path(panel: Panel) -> str:
    """A critical path. Neighbours on one stage, or that pass one microbatch from stage to stage, are one part."""
    parts: list[list[Action]] = []
    passing = False
    for action in panel.critical_path:
        last = parts[-1] if parts else []
        stays = bool(last) and last[-1].stage == action.stage
        passes = bool(last) and (last[-1].kind, last[-1].microbatch) == (action.kind, action.microbatch)
        if last and (len(last) == 1 or passing == passes) and (stays or passes):
            last.append(action)
            passing = passes
        else:
            parts.append([action])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}..{part[-1]} ({len(part)})" for part in parts]
    if len(texts) > _STEPS:
        half = _STEPS // 2
        texts = [*texts[:half], f"{len(texts) - 2 * half} more", *texts[-half:]]
    return " > ".join(texts)


def _gain(gain: Gain) -> str:
    return f"{_ms(gain.ms)}, {_percent(gain.gain)} throughput"


def _differs(gain: Gain) -> bool:
    return gain.stable_ms < gain.ms * (1.0 - 1e-6)


def _stable(gain: Gain) -> str:
    return f"{_ms(gain.stable_ms)}, {_percent(gain.stable_gain)}"


def held_text(microbatches: float) -> str:
    """Microbatches in memory, with a decimal only where a rank holds some of its layers alone."""
    return f"{microbatches:.1f}".removesuffix(".0")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value >= 10 else f"{value:.3g} ms"
