import pytest
from schedules import gpipe, one_f_one_b

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.forecast import Forecast
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.training import log_lines
from tf_adapters.training.phases import PhaseSchedule
from tf_adapters.training.state import RunState


def test_phases_follow_each_other_at_the_papers_steps():
    phases = PhaseSchedule.of_lengths(warmup=3, monitoring=4, progressive=5)
    assert (phases.warmup_end, phases.monitoring_end, phases.progressive_end) == (3, 7, 12)
    expected = (
        [Phase.WARMUP] * 3
        + [Phase.MONITORING_UPPER] * 2
        + [Phase.MONITORING_LOWER] * 2
        + [Phase.PROGRESSIVE] * 5
        + [Phase.STABLE] * 2
    )
    assert [phases.phase(step) for step in range(1, 15)] == expected


def test_upper_monitoring_is_half_of_monitoring_and_not_half_of_the_steps_so_far():
    assert PhaseSchedule.of_lengths(warmup=100, monitoring=40, progressive=50).upper_end == 120


def test_the_ramp_rises_in_equal_parts_and_stays():
    phases = PhaseSchedule.of_lengths(warmup=0, monitoring=2, progressive=4)
    assert [phases.ramp(step) for step in range(1, 9)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]


def test_without_progressive_steps_freezing_is_stable_at_once():
    phases = PhaseSchedule.of_lengths(warmup=0, monitoring=2, progressive=0)
    assert phases.phase(3) is Phase.STABLE
    assert phases.ramp(3) == 1


@pytest.mark.parametrize("monitoring", [2, 3, 7])
def test_both_bounds_get_at_least_one_step(monitoring):
    phases = PhaseSchedule.of_lengths(warmup=1, monitoring=monitoring, progressive=0)
    seen = {phases.phase(step) for step in range(2, 2 + monitoring)}
    assert seen == {Phase.MONITORING_UPPER, Phase.MONITORING_LOWER}


def test_mixed_monitoring_draws_in_every_second_step():
    phases = PhaseSchedule.of_lengths(warmup=1, monitoring=4, progressive=1, mixed=True)
    assert [phases.phase(step) for step in range(1, 8)] == [
        Phase.WARMUP,
        *[Phase.MONITORING_UPPER, Phase.MONITORING_MIXED] * 2,
        Phase.PROGRESSIVE,
        Phase.STABLE,
    ]
    assert [phases.mixed_turn(step) for step in (3, 5)] == [0, 1]


def test_mixed_monitoring_is_one_phase_to_the_reader():
    phases = PhaseSchedule.of_lengths(warmup=0, monitoring=4, progressive=1, mixed=True)
    assert len({phases.description(step) for step in range(1, 5)}) == 1
    halves = PhaseSchedule.of_lengths(warmup=0, monitoring=4, progressive=1)
    assert len({halves.description(step) for step in range(1, 5)}) == 2


def test_mixed_monitoring_may_end_after_pairs_of_steps_once_there_are_enough():
    phases = PhaseSchedule.of_lengths(warmup=3, monitoring=16, progressive=5, mixed=True)
    assert [step for step in range(1, 25) if phases.may_end_monitoring(step)] == [13, 15, 17, 19]
    halves = PhaseSchedule.of_lengths(warmup=3, monitoring=16, progressive=5)
    assert not any(halves.may_end_monitoring(step) for step in range(1, 25))


def test_monitoring_that_ends_early_brings_everything_after_it_forward():
    phases = PhaseSchedule.of_lengths(warmup=2, monitoring=40, progressive=5, mixed=True).monitored_until(12)
    assert phases.phase(12) is Phase.MONITORING_MIXED
    assert [phases.phase(step) for step in (13, 17, 18)] == [Phase.PROGRESSIVE, Phase.PROGRESSIVE, Phase.STABLE]


def test_a_pipeline_that_is_too_small_to_gain_is_told_so():
    def line(stages, microbatches, **settings):
        orders = [[f"{s}{k}{m}" for k in "FB" for m in range(microbatches)] for s in range(stages)]
        return log_lines.small(PipelineSchedule.from_text(orders), TimelyFreezeConfig(**settings))

    assert "nothing to gain here with nothing frozen" in line(1, 8)
    assert "only by the weight gradients that it skips" in line(1, 1, goal="paper")
    assert "a batch of one microbatch keeps 3 of 4 stages waiting" in line(4, 1)
    assert line(2, 2) is None


DRAWN = "monitoring, every second step with drawn freeze ratios"
HOST = "measured; every step runs as the host alone"


@pytest.mark.parametrize(
    ("settings", "monitoring", "then"),
    [
        ({"goal": "paper"}, DRAWN, "stable freezing"),
        ({"goal": "paper", "weight_gradients": "deferred"}, "monitoring, nothing frozen", "stable freezing"),
        ({"granularity": "token", "weight_gradients": "deferred"}, DRAWN, "stable freezing"),
        ({"method": "none"}, DRAWN, HOST),
        ({"method": "none", "max_freeze_ratio": 0.0}, "monitoring", HOST),
        ({}, "monitoring", "stable, the order of the host stays"),
    ],
)
def test_only_a_run_that_may_freeze_speaks_of_it(settings, monitoring, then):
    config = TimelyFreezeConfig(warmup_steps=1, monitoring_steps=10, progressive_steps=0, **settings)
    state = RunState.fresh(config, 0)
    assert [log_lines.phase(config, state, step) for step in (2, 12)] == [monitoring, then]
    enabled = log_lines.enabled("host 1", gpipe(2, 2), config, state.phases)
    assert ("progressive freezing to 11, then stable freezing" in enabled) == (then == "stable freezing")
    assert ("freez" in enabled) == (bool(settings) and settings.get("max_freeze_ratio") != 0.0)


def test_a_plan_of_goal_exact_is_said_without_freeze_ratios():
    schedule = one_f_one_b(2, 4)
    times = {action: Bounds(1.0, 2.0) for action in schedule.actions}
    for ratio in (0.0, 0.8):
        line = log_lines.planned(plan(schedule, times, ratio), Forecast(10.0, 8.0), host_ms=0.0)
        start = "measured 10.0 ms a step while monitoring; plan: 8.0 ms"
        assert line.startswith(start + ("; " if ratio == 0.0 else " at mean freeze"))


def test_the_planned_gain_is_over_the_host_alone_and_not_over_monitored_steps():
    schedule = one_f_one_b(2, 4)
    made = plan(schedule, {action: Bounds(1.0, 2.0) for action in schedule.actions}, 0.0)
    line = log_lines.planned(made, Forecast(10.0, 8.0), host_ms=8.8)
    assert "plan: 8.0 ms, 1.10x as fast as the host alone in the warm-up (8.8 ms; " in line
    assert "1.25x" not in line
