"""What freezing would bring to tiny pipelines that can be added up by hand; who holds them; stages recut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from schedules import gpipe, one_f_one_b, split_gpipe, v_shape

from tf_adapters.errors import ConfigError, PlanInputError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import named_schedule
from tf_adapters.simulate.goal_comparison import goal_points
from tf_adapters.simulate.model_costs import StageCost, action_bounds
from tf_adapters.simulate.simulated_pipeline import Pipeline, between_ranks, carried_gaps, in_v, recut, stage_times
from tf_adapters.simulate.simulation import held_by, simulate
from tf_adapters.simulate.simulation_page import simulation_page

# F 10 ms, B 20 ms, of which 10 are weight gradients, on every stage.
PIECE = StageCost(10.0, 10.0, 10.0)


def pipeline(schedule: PipelineSchedule, *costs: StageCost, delay: float = 0.0) -> Pipeline:
    pieces = costs or (PIECE,) * schedule.num_stages
    gaps = between_ranks(schedule, delay)
    return Pipeline("tiny", Measurement(schedule, action_bounds(schedule, pieces, 1.0), gaps.communication))


def durations(schedule: PipelineSchedule, **stages: float) -> dict[Action, float]:
    return {action: stages.get(f"s{action.stage}", 1.0) for action in schedule.actions}


def test_one_microbatch_on_two_stages_is_a_sum() -> None:
    """F0 F1 B1 B0: 10 + 10 + 20 + 20 = 60; 50 at r_max 0.5; 40 with everything frozen, 30 with 0B0 gone."""
    found = simulate(pipeline(gpipe(2, 1)), 0.5, (0.0, 0.5, 1.0))
    assert found.unfrozen.end_ms == pytest.approx(60.0)
    assert found.gain.ms == pytest.approx(50.0)
    assert found.gain.gain == pytest.approx(0.2)
    assert found.gain.stable_ms == pytest.approx(50.0)
    assert found.most.ms == pytest.approx(40.0)
    assert found.most.gain == pytest.approx(0.5)
    assert found.most.stable_ms == pytest.approx(30.0)
    assert found.most.stable_gain == pytest.approx(1.0)
    assert [point.batch.ms for point in found.sweep] == pytest.approx([60.0, 50.0, 40.0])
    assert [point.batch.stable_ms for point in found.sweep] == pytest.approx([60.0, 50.0, 30.0])
    assert [point.mean_freeze_ratio for point in found.sweep] == pytest.approx([0.0, 0.5, 1.0])


def test_busy_times_and_bubbles_before_and_after() -> None:
    """GPipe, two stages, two microbatches: 90 ms, each rank works 60 of them; 60 and 40 with everything frozen."""
    found = simulate(pipeline(gpipe(2, 2)), 1.0)
    assert found.unfrozen.end_ms == pytest.approx(90.0)
    assert found.unfrozen.busy_ms == pytest.approx((60.0, 60.0))
    assert found.unfrozen.bubbles == pytest.approx((1 / 3, 1 / 3))
    assert found.unfrozen.bubble == pytest.approx(1 / 3)
    assert found.frozen.end_ms == pytest.approx(60.0)
    assert found.frozen.busy_ms == pytest.approx((40.0, 40.0))
    assert found.planned.end_ms == pytest.approx(found.plan.makespan_ms.planned)


def test_another_order_has_the_measured_gaps_on_average() -> None:
    schedule = named_schedule("one_f_one_b", 2, 4)
    slow = {edge: 1.0 + 2.0 * edge[1].stage for edge in schedule.transfers()}
    before = {action: 0.5 if action.kind is Kind.FORWARD else 1.5 for rank in schedule.ranks for action in rank[1:]}
    measured = Measurement(schedule, {}, slow, before)
    assert carried_gaps(measured, schedule).overhead == before
    other = named_schedule("zbv", 2, 4)
    gaps = carried_gaps(measured, other)
    assert gaps.communication == between_ranks(other, 2.0).communication
    assert {(action.kind, ms) for action, ms in gaps.overhead.items()} == {(Kind.FORWARD, 0.5), (Kind.INPUT_GRAD, 1.5)}


def test_communication_between_ranks_is_in_every_number() -> None:
    """5 ms on each of two hand-overs: 60 -> 70, everything frozen 40 -> 50, with 0B0 gone 40."""
    found = simulate(pipeline(gpipe(2, 1), delay=5.0), 1.0)
    assert found.unfrozen.end_ms == pytest.approx(70.0)
    assert found.gain.ms == pytest.approx(50.0)
    assert found.gain.stable_ms == pytest.approx(40.0)
    assert found.most.ms == pytest.approx(50.0)


def test_a_rank_hands_over_to_itself_at_once() -> None:
    schedule = v_shape(2, 1)  # rank 0: stages 0 and 3, rank 1: 1 and 2
    pairs = {f"{source}->{target}" for source, target in between_ranks(schedule, 2.0).communication}
    assert pairs == {"0F0->1F0", "2F0->3F0", "3B0->2B0", "1B0->0B0"}
    assert between_ranks(schedule, 0.0).communication == {}


def test_the_slowest_stage_holds_the_batch() -> None:
    schedule = one_f_one_b(3, 4)
    lengths = durations(schedule, s1=5.0)
    holder = held_by(schedule, PipelineDag.from_schedule(schedule), lengths)
    # 0F0, the eight actions of stage 1, 0B3: 40 of 42 ms.
    assert (holder.rank, holder.stages) == (1, (1,))
    assert holder.share == pytest.approx(40 / 42)
    assert str(holder) == "stage 1"


def test_of_many_critical_paths_the_longest_on_a_rank_counts() -> None:
    """Equal stages: paths wander, and only on the last stage can one stay for all 2 x 3 actions of the 8 slots."""
    schedule = one_f_one_b(2, 3)
    holder = held_by(schedule, PipelineDag.from_schedule(schedule), durations(schedule))
    assert holder.stages == (1,)
    assert holder.share == pytest.approx(6 / 8)


def test_a_rank_of_several_stages_is_named_with_them() -> None:
    schedule = v_shape(2, 2)
    lengths = durations(schedule, s1=3.0, s2=3.0)
    assert str(held_by(schedule, PipelineDag.from_schedule(schedule), lengths)) == "rank 1 (stages 1, 2)"


def test_a_batch_that_takes_no_time_has_no_gain_and_no_bubble() -> None:
    schedule = gpipe(2, 1)
    found = simulate(Pipeline("empty", Measurement(schedule, dict.fromkeys(schedule.actions, Bounds(0.0, 0.0)))), 0.8)
    assert (found.gain.gain, found.most.gain, found.unfrozen.bubble, found.holder.share) == (0.0, 0.0, 0.0, 0.0)


def test_wrong_times_are_the_planners_errors() -> None:
    schedule = gpipe(2, 1)
    with pytest.raises(PlanInputError, match="min exceeds max"):
        simulate(Pipeline("wrong", Measurement(schedule, dict.fromkeys(schedule.actions, Bounds(2.0, 1.0)))), 0.8)


def test_json_holds_every_number() -> None:
    data = json.loads(json.dumps(simulate(pipeline(gpipe(2, 1)), 0.5, (1.0,)).to_json()))
    assert (data["ranks"], data["stages"], data["microbatches"]) == (2, 2, 1)
    assert data["unfrozen"]["ms"] == pytest.approx(60.0)
    assert data["unfrozen"]["rank_busy_ms"] == pytest.approx([30.0, 30.0])
    assert data["unfrozen"]["critical_path"] == ["0F0", "1F0", "1B0", "0B0"]
    assert data["planned"]["gain"] == pytest.approx(0.2)
    assert data["most"]["stable_ms"] == pytest.approx(30.0)
    assert data["most"]["held_by"]["stages"] == [0]
    assert data["sweep"][0]["max_freeze_ratio"] == 1.0
    assert data["plan"]["freeze_ratio"] == {"0B0": pytest.approx(0.5), "1B0": pytest.approx(0.5)}


def test_recut_keeps_the_sum_and_the_order() -> None:
    pieces = (StageCost(1.0, 2.0, 3.0), StageCost(5.0, 6.0, 7.0))
    assert recut(pieces, 4) == (StageCost(0.5, 1.0, 1.5),) * 2 + (StageCost(2.5, 3.0, 3.5),) * 2
    assert recut(recut(pieces, 4), 2) == pieces
    assert recut(pieces, 1) == (StageCost(6.0, 8.0, 10.0),)
    with pytest.raises(ConfigError, match="times of 2 stages cannot become those of 3"):
        recut(pieces, 3)


@pytest.mark.parametrize("schedule", [gpipe(3, 2), split_gpipe(3, 2)])
def test_stage_times_are_the_inverse_of_action_bounds(schedule: PipelineSchedule) -> None:
    costs = tuple(StageCost(1.0 + stage, 2.0 + stage, 3.0 + stage) for stage in range(3))
    found = stage_times(Measurement(schedule, action_bounds(schedule, costs, 1.0)))
    for one, other in zip(found, costs, strict=True):
        assert (one.forward, one.input_grad, one.weight_grad) == pytest.approx(
            (other.forward, other.input_grad, other.weight_grad)
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_holder_is_found_among_all_critical_paths(seed: int) -> None:
    """Small whole durations make many paths critical: every one of them is walked here."""
    random = Random(seed)
    schedule = random.choice([gpipe(3, 3), one_f_one_b(3, 3), v_shape(2, 2), split_gpipe(2, 3)])
    lengths = {action: float(random.randint(1, 2)) for action in schedule.actions}
    dag = PipelineDag.from_schedule(schedule)
    starts = dag.start_times(lengths)
    end = dag.makespan(lengths)
    before: dict[Action, list[Action]] = {action: [] for action in dag.actions}
    for source, target in zip(dag.edges.sources, dag.edges.targets, strict=True):
        one, other = dag.actions[source], dag.actions[target]
        if starts[one] + lengths[one] == starts[other]:
            before[other].append(one)

    def walk(action: Action, on_rank: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
        rank = schedule.rank_of(action.stage)
        here = tuple(ms + lengths[action] * (number == rank) for number, ms in enumerate(on_rank))
        if not before[action]:
            yield here
        for earlier in before[action]:
            yield from walk(earlier, here)

    last = [action for action in dag.actions if starts[action] + lengths[action] == end]
    paths = [path for action in last for path in walk(action, (0.0,) * len(schedule.ranks))]
    assert all(sum(path) == end for path in paths)
    assert held_by(schedule, dag, lengths).share == pytest.approx(max(map(max, paths)) / end)


def test_steps_that_overlap_show_two_steps_and_the_rank_that_holds_the_period() -> None:
    schedule = one_f_one_b(4, 8)
    whole = pipeline(schedule, *[StageCost(10.0, 10.0, 10.0)] * 3, StageCost(11.0, 11.0, 11.0))
    whole = Pipeline(whole.name, replace(whole.measurement, steps="overlap"))
    result = simulate(whole, 0.0, extra_microbatches=4)
    assert result.exact is not None
    assert result.exact.overlap
    assert result.exact.end_ms == pytest.approx(8 * 33.0)
    assert result.exact.busy_ms == pytest.approx((240.0, 240.0, 240.0, 264.0))
    assert result.exact.bubbles[3] == pytest.approx(0.0)
    assert len(result.exact.blocks) == 2 * len({block.action for block in result.exact.blocks})
    assert result.exact.drawn_ms > 1.9 * result.exact.end_ms
    assert result.holder.rank == 3
    met = simulate(Pipeline("met", replace(whole.measurement, steps="meet")), 0.0, extra_microbatches=4)
    assert met.exact is not None
    assert not met.exact.overlap
    assert met.exact.end_ms > result.exact.end_ms


def test_each_goal_is_planned_from_the_same_times() -> None:
    whole = pipeline(one_f_one_b(4, 8))
    points = goal_points(Pipeline("overlap", replace(whole.measurement, steps="overlap")))
    cut, roomy, exact, paper = points  # as fast as with more memory, but without it
    assert [(point.goal, point.extra_microbatches, point.placement) for point in points] == [
        ("exact", 0, "v"),
        ("exact", 4, "host"),
        ("exact", 0, "host"),
        ("paper", 0, "host"),
    ]
    assert cut.held == 4
    assert cut.batch.ms == pytest.approx(roomy.batch.ms)
    assert exact.mean_freeze_ratio == roomy.mean_freeze_ratio == 0.0
    assert exact.held == paper.held == 4
    assert 4 < roomy.held <= 8
    assert roomy.batch.gain > exact.batch.gain > 0.0
    assert paper.mean_freeze_ratio > 0.0


def test_goals_are_on_the_page_and_in_the_json() -> None:
    whole = pipeline(one_f_one_b(2, 4))
    found = replace(simulate(whole, 0.8), goals=goal_points(whole))
    page = simulation_page(found, "given", (), width=120)
    table = next(table for table in page.tables if table.title == "What each goal would bring")
    assert [row[0] for row in table.rows] == ["exact, placement v (ZBV on torch)", "exact", "paper"]
    assert table.rows[0][-1] == "all, the same bits"
    (exact, *_) = json.loads(json.dumps(found.to_json()))["goals"]
    assert exact["batch"]["ms"] == found.goals[0].batch.ms


def test_a_v_is_planned_only_from_one_stage_on_each_rank() -> None:
    assert in_v(pipeline(one_f_one_b(4, 8)).measurement) is not None
    assert in_v(pipeline(split_gpipe(2, 4)).measurement) is None
    assert in_v(pipeline(one_f_one_b(1, 4)).measurement) is None
