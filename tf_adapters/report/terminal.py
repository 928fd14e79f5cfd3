"""A report for the terminal: what freezing brought, per stage, in words that need no manual.

The text is the same with and without rich; rich, where installed, only draws the table better.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from tf_adapters.ir import Kind, PipelineSchedule
from tf_adapters.report.schema import Report

__all__ = ["print_summary", "summary"]

_NOTHING = "-"
_HEADER = (
    "stage",
    "rank",
    "planned to skip",
    "really skipped",
    "backward ms, nothing skipped",
    "backward ms, stable",
)
_STATUS = {
    "warmup": "warming up: nothing is measured and nothing is frozen yet",
    "monitoring": "monitoring: timing the steps, with nothing frozen and with every weight gradient skipped",
    "planned": "planned: freezing starts with the next steps",
    "progressive": "progressive freezing: the shares rise step by step to the plan's",
    "stable": "stable freezing: the plan is in force",
    "disabled": "disabled: the host trains as if tf-adapters were not there",
    "failed": "failed: the notes below say why",
}


@dataclass(frozen=True, slots=True)
class _Parts:
    """The summary before it is laid out."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def summary(report: Report) -> str:
    """The report as plain text."""
    parts = _parts(report)
    blocks = [parts.headline, _facts(parts)]
    if parts.rows:
        blocks.append(_TABLE_TITLE + "\n" + _table((_HEADER, *parts.rows)))
    if parts.notes:
        blocks.append(_notes(parts))
    return "\n\n".join(blocks)


def print_summary(report: Report, stream: TextIO | None = None) -> None:
    """Print the summary to ``stream`` (standard output); on a terminal with rich, as a rich table."""
    out = stream or sys.stdout
    if not (out.isatty() and _print_rich(_parts(report), out)):
        print(summary(report), file=out)


_TABLE_TITLE = "Share of each stage's weight gradients that is skipped (backward: per microbatch)"


def _parts(report: Report) -> _Parts:
    schedule = report.schedule.parse()
    return _Parts(_headline(report), tuple(_fact_lines(report, schedule)), _rows(report, schedule), _remarks(report))


def _headline(report: Report) -> str:
    measured = report.measured
    unfrozen, stable = measured.step_ms_unfrozen, measured.step_ms_stable
    planned = f"{1 / measured.planned_ratio:.2f}x planned" if measured.planned_ratio else ""
    if unfrozen is None:
        return "step time not measured yet" + (f"; {planned}" if planned else "")
    if stable is None:
        wait = "not run" if report.status in ("disabled", "failed") else "still to be measured"
        promise = f"{planned}, " if planned else ""
        return f"step {_ms(unfrozen)} with nothing frozen; {promise}stable freezing {wait}"
    ratio = measured.step_ratio or (stable / unfrozen if unfrozen else 0.0)
    factors = [f"{1 / ratio:.2f}x measured"] if ratio else []
    return f"step {_ms(unfrozen)} -> {_ms(stable)}: {', '.join([*factors, *([planned] if planned else [])])}"


def _fact_lines(report: Report, schedule: PipelineSchedule) -> Iterable[tuple[str, str]]:
    yield "status", f"{_STATUS[report.status]} (step {report.step}{_phase_ends(report)})"
    ranks, microbatches = len(schedule.ranks), schedule.num_microbatches
    yield (
        "pipeline",
        (
            f"{report.host.name} {report.host.version}: {schedule.num_stages} stages on {ranks} ranks,"
            f" {microbatches} microbatches"
        ),
    )
    plan = report.plan
    if plan is None:
        yield "plan", "none yet" if report.status in ("warmup", "monitoring") else "none"
    else:
        spans = plan.makespan_ms
        yield (
            "batch",
            (
                f"pipeline computation {_ms(spans.unfrozen)} nothing frozen, {_ms(spans.planned)} planned,"
                f" {_ms(spans.fully_frozen)} everything frozen"
            ),
        )
        limit = report.config.get("max_freeze_ratio")
        bound = f", limit {limit:.0%} per stage" if isinstance(limit, (int, float)) else ""
        yield "plan", f"skip {plan.mean_freeze_ratio:.0%} of the weight gradients on average{bound}"
        solver = plan.solver
        gap = f"at most {solver.optimality_gap:.2%} from the best possible"
        yield "solver", f"{solver.name}, {solver.status.value.lower()} in {solver.seconds:.2f} s: {gap}"
    memory = report.measured.peak_memory_bytes
    if memory.unfrozen:
        peaks = [memory.unfrozen, *([memory.stable] if memory.stable else [])]
        yield "memory", f"peak on the fullest rank {' -> '.join(_gib(max(ranks_)) for ranks_ in peaks)}"


def _phase_ends(report: Report) -> str:
    phases = report.phases
    ends = (
        ("warm-up", phases.warmup_end),
        ("monitoring", phases.monitoring_end),
        ("progressive", phases.progressive_end),
    )
    known = [f"{name} {step}" for name, step in ends if step is not None]
    return f"; last step of {', '.join(known)}" if known else ""


def _rows(report: Report, schedule: PipelineSchedule) -> tuple[tuple[str, ...], ...]:
    if not report.times and report.plan is None:
        return ()
    stable = _stable_times(report)
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


def _stable_times(report: Report) -> dict[str, float]:
    """Measured ms of each backward in the stable phase: the samples nearest to the planned ratio."""
    if report.status != "stable":
        return {}
    ratios = {str(action): ratio for action, ratio in report.plan.freeze_ratio.items()} if report.plan else {}
    nearest: dict[str, tuple[float, float]] = {}
    for sample in report.measured.backward_ms:
        away = abs(sample.afr - ratios.get(sample.action, 1.0))
        # Of equally near samples the last one counts: a report lists the stable phase after the monitoring.
        if sample.action not in nearest or away <= nearest[sample.action][0]:
            nearest[sample.action] = (away, sample.ms)
    return {action: ms for action, (_, ms) in nearest.items()}


def _per_microbatch(actions: list[str], times: dict[str, float], microbatches: int) -> str:
    if not actions or any(action not in times for action in actions):
        return _NOTHING
    return f"{sum(times[action] for action in actions) / microbatches:.1f}"


def _remarks(report: Report) -> tuple[str, ...]:
    ratio = report.measured.step_ratio
    own = ["freezing has not made the step faster"] if ratio is not None and ratio >= 0.995 else []
    return (*own, *report.note)


def _facts(parts: _Parts) -> str:
    return "\n".join(f"{name + ':':<10}{text}" for name, text in parts.facts)


def _notes(parts: _Parts) -> str:
    return "\n".join(f"note: {note}" for note in parts.notes)


def _table(rows: tuple[tuple[str, ...], ...]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _print_rich(parts: _Parts, out: TextIO) -> bool:
    """Print with rich; False, and nothing printed, where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out, highlight=False)
    console.print(Text(parts.headline, style="bold"))
    console.print(Text("\n" + _facts(parts)))
    if parts.rows:
        table = Table(*_HEADER, title=_TABLE_TITLE, title_justify="left", title_style="")
        for column in table.columns:
            column.justify = "right"
        for row in parts.rows:
            table.add_row(*row)
        console.print("", table)
    if parts.notes:
        console.print(Text("\n" + _notes(parts)))
    return True


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
