"""Whether ranks meet between two steps, from traces of steps that were made on paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from clocks import FakeClock
from schedules import gpipe, one_f_one_b

from tf_adapters.measuring.between_steps import BetweenSteps, between_steps
from tf_adapters.measuring.compact import PackedTraces
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer, Interval, Trace
from tf_adapters.measuring.transfers import complete_steps
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.period import PeriodicDag

DURATION = {Kind.FORWARD: 10.0, Kind.BACKWARD: 20.0}
OWN = (5.0, 3.0, 4.0)  # ms of each rank between its steps


def begun(
    schedule: PipelineSchedule, meet: bool, after_ms: float = 0.0, own: Sequence[float] = OWN
) -> tuple[list[Trace], list[float]]:
    """A step that repeats: each rank's trace since the rank began the step, and its time until the next step.

    If ranks ``meet``, all begin when the batch has ended, ``after_ms`` later. ``own`` are times between steps, in ms.
    """
    dag = PeriodicDag.of(PipelineDag.from_schedule(schedule), schedule, dict(enumerate(own)))
    durations = {action: DURATION[action.kind] for action in schedule.actions}
    starts = dag.start_times(durations)
    ends = [starts[row[-1]] + durations[row[-1]] for row in schedule.ranks]
    if meet:
        length = max(ends) + after_ms + max(own)
        begins = [0.0] * len(ends)
    else:
        length = dag.span_ms(durations)
        begins = [end + between - length for end, between in zip(ends, own, strict=True)]
    traces = [
        {a: Interval(starts[a] - begin, starts[a] + durations[a] - begin) for a in row}
        for row, begin in zip(schedule.ranks, begins, strict=True)
    ]
    return traces, [length] * len(ends)


def found(schedule: PipelineSchedule, steps: list[tuple[list[Trace], list[float]]], known: float = 1.0) -> BetweenSteps:
    """What these steps show if the time until the next step is ``known`` of this share of them."""
    ranks = []
    for rank in range(len(schedule.ranks)):
        traces = [(number, of_rank[rank]) for number, (of_rank, _) in enumerate(steps)]
        until = {number: ms[rank] for number, (_, ms) in enumerate(steps) if number < known * len(steps)}
        ranks.append(PackedTraces.of(schedule, traces, until))
    traces_of = complete_steps(schedule, [packed.unpack(schedule) for packed in ranks])
    return between_steps(schedule, traces_of, ranks)


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
def test_steps_of_ranks_that_do_not_meet_overlap(make):
    schedule = make(3, 6)
    steps, between, _ = found(schedule, [begun(schedule, meet=False)] * 7)
    assert steps == "overlap"
    assert between == pytest.approx(dict(enumerate(OWN)), abs=1e-2)


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize("after_ms", [0.0, 7.0])
def test_ranks_that_begin_after_the_batch_meet(make, after_ms):
    schedule = make(3, 6)
    assert found(schedule, [begun(schedule, meet=True, after_ms=after_ms)] * 7) == BetweenSteps("meet", {})


@pytest.mark.parametrize("meet", [True, False])
def test_own_work_longer_than_the_last_backward_hides_whether_ranks_meet(meet):
    """Two microbatches: the rank that ends first has 20 ms until the batch's end, and its own work takes 25 ms."""
    schedule = one_f_one_b(2, 2)
    steps, between, is_clear = found(schedule, [begun(schedule, meet=meet, own=(25.0, 25.0))] * 7)
    assert (steps, is_clear) == ("meet", False)
    assert between == pytest.approx({0: 25.0, 1: 25.0}, abs=1e-2)


def test_a_rank_that_its_last_message_holds_does_not_seem_to_meet():
    """Both ranks begin the next step at the same time, although nothing makes them meet.

    Recorded between the steps of two ranks with AdamW and 512 wide layers: 22.7 and 46.2 ms after their last actions.
    """
    schedule = one_f_one_b(2, 2)
    traces, _ = begun(schedule, meet=False, own=OWN[:2])
    ends = [of_rank[row[-1]].end_ms for of_rank, row in zip(traces, schedule.ranks, strict=True)]
    until_next = [ends[0] + 22.7, ends[1] + 46.2]
    assert not found(schedule, [(traces, until_next)] * 7).is_clear


def test_a_weight_that_the_first_and_the_last_rank_share_makes_them_meet():
    """The rank between them goes on, but the pipeline's step is no shorter for it."""
    schedule = one_f_one_b(3, 6)
    traces, length = begun(schedule, meet=True)
    step = traces, [length[0], length[1] - 15.0, length[2]]
    assert found(schedule, [step] * 7) == BetweenSteps("meet", {})


def test_what_at_least_half_of_the_steps_show_counts():
    schedule = one_f_one_b(3, 6)
    apart, together = begun(schedule, meet=False), begun(schedule, meet=True, after_ms=50.0)
    assert found(schedule, [apart] * 5 + [together] * 2).steps == "overlap"
    assert found(schedule, [apart] * 2 + [together] * 5).steps == "meet"


def test_only_steps_whose_next_one_is_known_count():
    schedule = one_f_one_b(3, 6)
    assert found(schedule, [begun(schedule, meet=False)] * 6, known=0.5).steps == "overlap"
    assert found(schedule, [begun(schedule, meet=False)] * 6, known=0.0) == BetweenSteps("meet", {})
    assert between_steps(schedule, {}, []) == BetweenSteps("meet", {})


def test_one_rank_alone_meets_nobody():
    schedule = one_f_one_b(1, 4)
    trace = {action: Interval(10.0 * n, 10.0 * n + 9.0) for n, action in enumerate(schedule.actions)}
    assert found(schedule, [([trace], [90.0])] * 4) == BetweenSteps("meet", {})


def test_the_timer_says_how_long_it_takes_from_step_to_step():
    clock, forward = FakeClock(), Action.parse("0F0")
    timer = ActionTimer(clock)
    for number, pause in ((3, 1.0), (4, 6.0), (5, 2.0)):
        start = timer.start_step(microbatches=1)
        with timer.timed(Phase.MONITORING_UPPER, forward):
            clock.now += 10.0
        timer.stop_step(Phase.MONITORING_UPPER, start, number)
        clock.now += pause
    timer.drain()
    assert timer.until_next() == {3: 11.0, 4: 16.0}  # the step after number 5 has not begun
    assert timer.steps_ms(Phase.MONITORING_UPPER) == (10.0, 10.0, 10.0)
    timer.clear()
    timer.start_step()
    timer.drain()
    assert timer.until_next() == {}


def test_times_between_steps_are_sent_with_the_traces():
    schedule = one_f_one_b(2, 2)
    rng = np.random.default_rng(0)
    traces = [
        (n, {a: Interval(float(x), float(x) + 1.0) for a, x in zip(schedule.ranks[1], rng.random(4), strict=True)})
        for n in (4, 5)
    ]
    packed = PackedTraces.of(schedule, traces, {4: 12.5, 9: 1.0})
    assert packed.rank(schedule) == 1
    assert packed.unpack_until_next() == {4: 12.5}
