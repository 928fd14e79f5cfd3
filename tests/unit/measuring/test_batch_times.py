"""Where the ranks' time in a batch goes, on hand-made times; what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sample_reports import MS, report_of
from schedules import traced

from tf_adapters.cli import main
from tf_adapters.errors import ConfigError
from tf_adapters.measuring.batch_times import BatchTimes, batch_times, with_replicas
from tf_adapters.measuring.timer import Interval, Trace
from tf_adapters.measuring.transfers import NO_GAPS, Gaps, measure_gaps
from tf_adapters.report.batch import batch_of
from tf_adapters.report.layout import before
from tf_adapters.report.page import as_text
from tf_adapters.report.schema import Report
from tf_adapters.report.terminal import page
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import interleaved, one_forward_one_backward, zbv
from tf_adapters.training.batch_words import log_line

OLD = Path(__file__).resolve().parents[2] / "data" / "report_format_1.json"
TWO = one_forward_one_backward(2, 2)  # rank 0: F0 F1 B0 B1; rank 1: F0 B0 F1 B1


def step_of(
    schedule: PipelineSchedule, gaps: Gaps = NO_GAPS, slower: Mapping[int, float] | None = None, pace: float = 1.0
) -> Trace:
    """A step on one clock, each stage as many times slower as said."""
    ms = {a: pace * MS[a.kind] * (slower or {}).get(a.stage, 1.0) for a in schedule.actions}
    starts = PipelineDag.from_schedule(schedule, *gaps).start_times(ms)
    return {a: Interval(starts[a], starts[a] + ms[a]) for a in schedule.actions}


def times_of(schedule: PipelineSchedule, gaps: Gaps = NO_GAPS, **more: Any) -> BatchTimes:
    found = batch_times(schedule, [step_of(schedule, gaps, **more)], gaps)
    assert found is not None
    return found


# --- bubble, waits, critical path --------------------------------------------------------------------------------


def test_a_known_bubble():
    """F0 F1 . . B0 B1 on rank 0 and . F0 B0 F1 B1 . on rank 1: 90 ms, of which each computes 60."""
    batch = times_of(TWO)
    assert batch.span_ms == pytest.approx(90.0)
    assert batch.bubbles == pytest.approx((1 / 3, 1 / 3))
    assert batch.bubble == pytest.approx(1 / 3)
    for rank in batch.ranks:
        assert rank.compute_ms == pytest.approx({"F": 20.0, "B": 40.0})
        assert (rank.waiting_ms, rank.transfer_ms, rank.overhead_ms) == pytest.approx((30.0, 0.0, 0.0))
    parts = {(part.stage, part.kind): part.ms for part in batch.critical_path}
    assert parts == pytest.approx({(0, "F"): 10.0, (1, "F"): 20.0, (1, "B"): 40.0, (0, "B"): 20.0})


@pytest.mark.parametrize("schedule", [TWO, one_forward_one_backward(4, 8), interleaved(2, 4), zbv(2, 4)])
def test_times_add_up_and_agree_with_the_graph(schedule):
    gaps = Gaps(dict.fromkeys(schedule.transfers(), 2.0), dict.fromkeys(schedule.actions, 0.5))
    batch = times_of(schedule, gaps)
    dag = PipelineDag.from_schedule(schedule, *gaps)
    durations = {a: MS[a.kind] for a in schedule.actions}
    assert batch.span_ms == pytest.approx(dag.makespan(durations))
    for rank in batch.ranks:
        total = rank.busy_ms + rank.waiting_ms + rank.transfer_ms + rank.overhead_ms
        assert total == pytest.approx(batch.span_ms)
    path = sum(part.ms for part in batch.critical_path) + batch.critical_transfer_ms + batch.critical_overhead_ms
    assert path == pytest.approx(batch.span_ms)
    busy = sum(durations.values()) / (len(schedule.ranks) * batch.span_ms)
    assert batch.bubble == pytest.approx(1.0 - busy)


def test_a_transfer_is_what_passes_after_the_input_was_computed():
    gaps = Gaps(dict.fromkeys(TWO.transfers(), 3.0))
    batch = times_of(TWO, gaps)
    first = next(edge for edge in batch.edges if (edge.source, edge.target, edge.kind) == (0, 1, "F"))
    # 1F0 waits 10 ms for 0F0 and 3 for its transfer; 1F1's input has long been there.
    assert (first.waiting_ms, first.transfer_ms, first.late_ms) == pytest.approx((10.0, 3.0, 0.0))
    assert batch.ranks[1].transfer_ms == pytest.approx(3.0)
    assert batch.critical_transfer_ms == pytest.approx(6.0)


def test_a_receive_that_is_posted_late_is_told_from_a_transfer():
    """The last forward's input has long been there, yet rank 1 begins it 7 ms after it was free."""
    schedule = one_forward_one_backward(2, 4)
    late = Action.parse("1F3")
    gaps = Gaps(dict.fromkeys(schedule.transfers(), 1.0), {late: 7.0})
    batch = batch_times(schedule, [step_of(schedule, gaps)], gaps)
    assert batch is not None
    worst = max(batch.edges, key=lambda edge: edge.late_ms)
    assert (worst.source, worst.target, worst.kind) == (0, 1, "F")
    assert worst.late_ms == pytest.approx(7.0)
    assert sum(edge.late_ms for edge in batch.edges) == pytest.approx(7.0)
    assert batch.ranks[1].overhead_ms == pytest.approx(7.0)
    assert "stage 1 receives stage 0's forwards late: for 7 ms" in log_line(batch, 200.0)


@pytest.mark.parametrize("ahead", [(0.0, 0.0), (0.0, 1000.0)], ids=["one clock", "clocks apart"])
def test_clocks_do_not_matter(ahead):
    gaps = Gaps(dict.fromkeys(TWO.transfers(), 2.0))
    steps = [{**first, **second} for first, second in (traced(TWO, gaps, ahead, seed) for seed in range(8))]
    batch = batch_times(TWO, steps, measure_gaps(TWO, steps))
    assert batch is not None
    assert batch.bubble == pytest.approx(1.0 - 60.0 / 94.0, abs=0.02)
    assert batch.steps == 4


def test_a_disturbed_step_does_not_count():
    steps = [*[step_of(TWO)] * 7, step_of(TWO, pace=50.0)]
    assert batch_times(TWO, steps) == batch_times(TWO, [step_of(TWO)] * 8)


def test_nothing_traced_is_no_batch():
    assert batch_times(TWO, []) is None


def test_a_batch_survives_json_and_a_report(tmp_path):
    batch = with_stragglers({0: 1.0, 2: 1.1}, {1: 1.0, 3: 1.5})
    assert BatchTimes.from_json(json.loads(json.dumps(batch.to_json()))) == batch
    shown = report_of(TWO, batch_times=batch.to_json())
    shown.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json").batch_times == batch


@pytest.mark.parametrize(
    ("batch", "problem"),
    [(3, "a dictionary"), ({"steps": 1}, "span_ms"), ({"steps": 1, "span_ms": -1.0, "ranks": []}, "span_ms")],
)
def test_a_damaged_batch_is_refused_in_one_line(batch, problem):
    with pytest.raises(ConfigError, match=f"batch.*{problem}"):
        report_of(TWO, batch_times=batch)


# --- replicas --------------------------------------------------------------------------------------------------


def with_stragglers(*stages: Mapping[int, float]) -> BatchTimes:
    """By stage: which ranks compute it, and how many times slower than 30 ms a microbatch each is."""
    ranks = [
        (rank, {(stage, kind): MS[kind] * pace for kind in (Kind.FORWARD, Kind.BACKWARD)})
        for stage, paces in enumerate(stages)
        for rank, pace in paces.items()
    ]
    slowest = [max(paces.values()) for paces in stages]
    upper = {a: MS[a.kind] * slowest[a.stage] for a in TWO.actions}
    return with_replicas(times_of(TWO), PipelineDag.from_schedule(TWO), upper, ranks)


def test_a_slow_replica_and_what_it_costs():
    """Stage 1 is slower by half on rank 5: the batch ends after 135 - 15 ms in place of 90."""
    batch = with_stragglers({0: 1.0, 2: 1.01, 4: 0.99}, {1: 1.0, 3: 1.0, 5: 1.5})
    (straggler,) = batch.stragglers
    assert (straggler.stage, straggler.rank) == (1, 5)
    assert (straggler.slowest_ms, straggler.median_ms) == pytest.approx((45.0, 30.0))
    slow = PipelineDag.from_schedule(TWO)
    at = {a: MS[a.kind] * (1.5 if a.stage else 1.01) for a in TWO.actions}
    like_the_others = {a: MS[a.kind] * (1.0 if a.stage else 1.01) for a in TWO.actions}
    assert straggler.cost_ms == pytest.approx(slow.makespan(at) - slow.makespan(like_the_others))
    assert straggler.cost_ms == pytest.approx(30.0)
    assert batch.replicas == 3
    said = log_line(batch, 150.0)
    assert "stage 1 on the job's rank 5 takes 45 ms a microbatch, the median of its replicas 30 ms (+50%)" in said
    assert "30 ms (20.0%) of a step" in said


def test_replicas_that_are_alike_are_no_stragglers():
    batch = with_stragglers({0: 1.0, 2: 1.02}, {1: 1.0, 3: 1.0})
    assert batch.stragglers == ()
    assert batch.replica_spread == pytest.approx(0.02)
    text = as_text(page(report_of(TWO, batch_times=batch.to_json())))
    assert "none: of a stage's 2 replicas the slowest is within 2.0% of the median" in text


def test_one_replica_has_no_stragglers():
    assert "straggler" not in as_text(page(report_of(TWO, batch_times=with_stragglers({0: 1.0}, {1: 1.0}).to_json())))


# --- the page --------------------------------------------------------------------------------------------------


def test_an_old_report_says_it_from_its_median_times(capsys):
    report = Report.read(OLD)
    assert report.batch_times is None
    batch = batch_of(report)
    assert batch is not None
    assert batch.bubbles == pytest.approx(before(report).bubbles)
    assert main(["show", str(OLD)]) == 0
    shown = capsys.readouterr().out
    assert "34% (rank 0), 34% (rank 1) of the 87.4 ms that a batch takes with every action at its median" in shown
    assert "microbatches held" not in shown


def test_a_run_that_only_measures_begins_with_its_bubble(tmp_path, capsys):
    report_of(TWO, batch_times=times_of(TWO).to_json()).write(tmp_path / "report.json")
    assert main(["show", str(tmp_path / "report.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bubble 33.3%: a batch takes 90 ms, a step 100 ms, nothing frozen"
    assert any(line.startswith("bubble:") and "(90 ms over 1 steps; 90 ms with every action" in line for line in lines)
    assert any("goal exact" in line and "all, the same bits" in line for line in lines)
    assert not any("has not made the step faster" in line for line in lines)


def test_a_report_without_times_has_no_bubble():
    assert "bubble" not in as_text(page(report_of(TWO, times={}, status="monitoring")))
