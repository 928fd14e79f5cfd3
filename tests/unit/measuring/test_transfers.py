"""Transfers and overheads from traces, each rank on a clock of its own; the traces come from a pipeline on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from schedules import DURATION, gpipe, one_f_one_b, traced, v_shape

from tf_adapters.measuring.timer import ActionTimer, Interval, Trace
from tf_adapters.measuring.transfers import Gaps, complete_steps, local_traces, measure_gaps
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule, SendWait


def gaps_of(schedule: PipelineSchedule, forward: float, backward: float, overhead: float) -> Gaps:
    """Transfers between ranks, forwards and backwards, and an overhead that every action has."""
    rank = {action: row for row, actions in enumerate(schedule.ranks) for action in actions}
    edges = {
        (source, target): (forward if source.kind is Kind.FORWARD else backward) + overhead
        for source, target in schedule.transfers()
        if rank[source] != rank[target]
    }
    return Gaps(edges, {action: overhead for row in schedule.ranks for _, action in pairwise(row)})


def numbered(ranks: Iterable[Sequence[Trace]]) -> list[list[tuple[int, Trace]]]:
    return [list(enumerate(traces)) for traces in ranks]


def measured(schedule: PipelineSchedule, gaps: Gaps, ahead: tuple[float, ...], steps: int = 9) -> Gaps:
    ranks = numbered(zip(*(traced(schedule, gaps, ahead, seed) for seed in range(steps)), strict=True))
    return measure_gaps(schedule, list(complete_steps(schedule, ranks).values()))


@pytest.mark.parametrize("ahead", [(0.0, 0.0, 0.0), (0.0, 1000.0, -17.5)], ids=["one clock", "clocks apart"])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_transfers_and_overheads_come_back_whatever_the_clocks_say(make, ahead):
    schedule = make(3, 8)
    found = measured(schedule, gaps_of(schedule, forward=2.0, backward=2.0, overhead=0.5), ahead)
    assert set(found.communication) == set(schedule.transfers())
    assert found.communication == pytest.approx(dict.fromkeys(schedule.transfers(), 2.5), abs=0.3)
    assert found.overhead == pytest.approx(dict.fromkeys(found.overhead, 0.5), abs=0.3)


def test_a_wait_for_the_peer_is_no_transfer():
    """Stage 1 computes twice as long: stage 0 waits for it in every backward, and sends in half a millisecond."""
    schedule = gpipe(2, 4)
    gaps = gaps_of(schedule, forward=0.5, backward=0.5, overhead=0.0)
    durations = {action: DURATION[action.kind] * (1 + action.stage) for action in schedule.actions}
    starts = PipelineDag.from_schedule(schedule, *gaps).start_times(durations)
    step = {action: Interval(starts[action], starts[action] + durations[action]) for action in schedule.actions}
    found = measure_gaps(schedule, [step])
    assert found.communication == pytest.approx(dict.fromkeys(schedule.transfers(), 0.5))


def test_a_wait_for_ones_own_rank_to_begin_the_step_is_no_transfer():
    """Rank 1 begins its step 40 ms late. Its first input has been there for long, and says nothing of the link."""
    schedule, late = one_f_one_b(2, 6), 40.0
    gaps = gaps_of(schedule, forward=2.0, backward=2.0, overhead=0.0)
    first = next(edge for edge in gaps.communication if edge[0].microbatch == 0 and edge[0].kind is Kind.FORWARD)
    durations = {action: DURATION[action.kind] for action in schedule.actions}
    held_up = {**gaps.communication, first: late - DURATION[Kind.FORWARD]}
    starts = PipelineDag.from_schedule(schedule, held_up).start_times(durations)
    step = {
        action: Interval(starts[action] - late * action.stage, starts[action] + durations[action] - late * action.stage)
        for action in schedule.actions
    }
    assert step[first[1]].start_ms == 0.0
    assert measure_gaps(schedule, [step]).communication == pytest.approx(gaps.communication)


def test_a_hand_over_on_one_rank_takes_what_it_takes():
    schedule = v_shape(2, 4)
    found = measured(schedule, gaps_of(schedule, forward=3.0, backward=3.0, overhead=0.2), (0.0, 40.0))
    rank = {action: row for row, actions in enumerate(schedule.ranks) for action in actions}
    for (source, target), ms in found.communication.items():
        assert ms == pytest.approx(3.2 if rank[source] != rank[target] else 0.2, abs=0.4)


def test_only_steps_that_all_ranks_have_whole_count():
    schedule = gpipe(2, 2)
    gaps = gaps_of(schedule, 1.0, 1.0, 0.0)
    first, second = numbered(zip(*(traced(schedule, gaps, (0.0, 0.0), seed) for seed in range(3)), strict=True))
    cut = [second[0], (1, {}), second[2]]
    assert len(complete_steps(schedule, [first, second])) == 3
    assert len(complete_steps(schedule, [first, cut])) == 2
    assert len(complete_steps(schedule, [first[1:], second, ()])) == 2
    assert complete_steps(schedule, [(), ()]) == {}


def test_a_rank_whose_device_is_a_step_behind_does_not_mix_two_steps():
    schedule = gpipe(2, 2)
    gaps = gaps_of(schedule, 1.0, 1.0, 0.0)
    first, second = numbered(zip(*(traced(schedule, gaps, (0.0, 0.0), seed) for seed in range(3)), strict=True))
    behind = complete_steps(schedule, [first, second[:2]])
    assert behind == complete_steps(schedule, [first[:2], second[:2]])


def test_nothing_traced_is_no_gaps():
    assert measure_gaps(gpipe(2, 2), []) == Gaps({}, {})


def test_what_a_rank_sends_is_bounded():
    class Clock:
        def mark(self) -> float:
            return 0.0

        def elapsed_ms(self, start: float, stop: float) -> float:
            return 0.0

        def synchronize(self) -> None: ...

    timer = ActionTimer(Clock())
    for number in range(40):
        start = timer.start_step()
        for microbatch in range(1000):
            with timer.timed("phase", Action(0, Kind.FORWARD, microbatch), 0.0):
                pass
        timer.stop_step("phase", start, number)
    timer.drain()
    assert len(timer.traces("phase", 0)) == 32
    assert len(local_traces(timer, "phase", 0)) == 4
    assert local_traces(timer, "another", 0) == ()


def test_a_plan_that_ignores_slow_links_is_worse():
    """Two nodes: with the slow link in the plan, freezing goes where its waits do not hide the gain already."""
    schedule = one_f_one_b(4, 6)
    times = {
        a: (0.5 * DURATION[a.kind] if a.freezable else DURATION[a.kind], DURATION[a.kind]) for a in schedule.actions
    }
    slow = {edge: 9.0 for edge in schedule.transfers() if {edge[0].stage, edge[1].stage} == {1, 2}}
    dag = PipelineDag.from_schedule(schedule, slow)

    def really(communication: Mapping[tuple[Action, Action], float]) -> float:
        return dag.makespan(plan(schedule, times, 0.5, communication).duration_ms)

    assert really(slow) < 0.99 * really({})


def test_a_send_that_waits_for_its_receiver_is_an_edge_of_its_own_and_no_overhead():
    """0F2 runs once stage 1 has taken 0F1's result, which it does when it has run 1F0: stage 1 takes longer."""
    order = gpipe(2, 3)
    sent = Action(0, Kind.FORWARD, 1), Action(1, Kind.FORWARD, 1)
    wait = SendWait(Action(1, Kind.FORWARD, 0), Action(0, Kind.FORWARD, 2), sent)
    schedule = PipelineSchedule(order.ranks, (wait,))
    durations = {action: DURATION[action.kind] * (1 + 3 * action.stage) for action in order.actions}
    gaps = gaps_of(order, forward=0.5, backward=0.5, overhead=0.0)
    edges = {(wait.posted, wait.blocked): 0.5}
    starts = PipelineDag.from_schedule(order, gaps.communication, gaps.overhead, edges).start_times(durations)
    step = {action: Interval(starts[action], starts[action] + durations[action]) for action in order.actions}
    found = measure_gaps(schedule, [step])
    assert found.waits == pytest.approx(edges)
    assert found.overhead[Action(0, Kind.FORWARD, 2)] == pytest.approx(0.0, abs=1e-9)
    assert PipelineDag.from_schedule(schedule, *found).start_times(durations) == pytest.approx(starts)


def test_a_wait_that_steps_refute_is_none():
    """The host sends without waiting: 0F2 runs before 1F0 has ended."""
    order = gpipe(2, 3)
    sent = Action(0, Kind.FORWARD, 1), Action(1, Kind.FORWARD, 1)
    wait = SendWait(Action(1, Kind.FORWARD, 0), Action(0, Kind.FORWARD, 2), sent)
    durations = {action: DURATION[action.kind] * (1 + 3 * action.stage) for action in order.actions}
    starts = PipelineDag.from_schedule(order).start_times(durations)
    step = {action: Interval(starts[action], starts[action] + durations[action]) for action in order.actions}
    assert measure_gaps(PipelineSchedule(order.ranks, (wait,)), [step]).waits == {}
