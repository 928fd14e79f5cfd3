"""Facts about a run's batch for its page: bubble, critical path, waits, late receives, stragglers."""

from __future__ import annotations

from collections.abc import Iterator

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.measuring.batch_times import BatchTimes, batch_times
from tf_adapters.measuring.timer import Interval
from tf_adapters.report.layout import before
from tf_adapters.report.schema import Report
from tf_adapters.training import batch_words
from tf_adapters.training.batch_words import milliseconds


def batch_of(report: Report) -> BatchTimes | None:
    """Return the measured times of the batch, or those that follow from each action's median, if there are any."""
    if report.batch_times is not None:
        return report.batch_times
    try:
        panel = before(report)
    except TimelyFreezeError:
        return None
    step = {block.action: Interval(block.start_ms, block.end_ms) for block in panel.blocks if block.step == 0}
    return batch_times(report.schedule, [step] if step else [], report.measurement.gaps)


def bubble_headline(report: Report) -> str | None:
    """The headline for a run that only measures; None before it has measured."""
    batch, step_ms = batch_of(report), report.measured.step_ms_unfrozen
    if batch is None:
        return None
    step = f", a step {milliseconds(step_ms)}" if step_ms else ""
    how = ", nothing frozen" if report.freezes else ""
    return f"bubble {batch.bubble:.1%}: a batch takes {milliseconds(batch.span_ms)}{step}{how}"


def batch_facts(report: Report) -> Iterator[tuple[str, str]]:
    """Lines for the page; none before anything is measured."""
    batch = batch_of(report)
    if batch is None or batch.span_ms <= 0.0:
        return
    yield "bubble", f"{batch_words.bubbles(batch)} of {_source(report, batch)}"
    yield "held by", f"{batch_words.held_by(batch)} of the critical path"
    if text := batch_words.waits(batch):
        yield "waits", text
    for text in batch_words.late_receives(batch):
        yield "late", text
    for text in batch_words.stragglers(batch, report.measured.step_ms_unfrozen or batch.span_ms):
        yield "straggler", text


def _source(report: Report, batch: BatchTimes) -> str:
    """Describe the source of a batch's times, and the time that the graph of the plans gives for it."""
    if report.batch_times is None:
        return f"the {milliseconds(batch.span_ms)} that a batch takes with every action at its median"
    try:
        graph = f"; {milliseconds(before(report).end_ms)} with every action at its median"
    except TimelyFreezeError:
        graph = ""
    return f"the batch ({milliseconds(batch.span_ms)} over {batch.steps} steps{graph})"
