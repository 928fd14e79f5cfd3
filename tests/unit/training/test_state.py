"""The state of a run: through a checkpoint and back, and how much of it still holds there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schedules import gpipe, one_f_one_b

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.measuring.phase import Phase
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.phases import PhaseSchedule
from tf_adapters.training.plan_maker import Planned
from tf_adapters.training.state import FORMAT, RunState, compatible_state, fingerprint

SCHEDULE = one_f_one_b(2, 3)
CONFIG = TimelyFreezeConfig(goal="paper", warmup_steps=5, monitoring_steps=10, progressive_steps=20)
MASKS = StageMasks({stage: [FreezeUnit((f"{stage}.weight",), 4.0, (2, 2))] for stage in (0, 1)}, seed=0)
AUTO_WARMUP = 3


def planned_state(completed: int) -> RunState:
    """A run that has its plan and is in progressive freezing at step ``completed``."""
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    state.completed_steps = completed
    bounds = {a: Bounds(1.1, 2.3) if a.freezable else Bounds(1.0, 1.0) for a in SCHEDULE.actions}
    edge = next(SCHEDULE.transfers())
    known = Measurement(SCHEDULE, bounds, {edge: 0.7}, {edge[1]: 0.1}, unfrozen_step_ms=12.3456789012345)
    state.measure(known, ("1B0: a note",))
    state.turn_to(SCHEDULE)
    state.adopt(SCHEDULE, Planned(plan(SCHEDULE, bounds, 0.8), 9.87654321))
    return state


def saved(state: RunState, config: TimelyFreezeConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    """What a checkpoint holds: through JSON text, as a file would have it."""
    state.turn_to(SCHEDULE)
    return {**json.loads(json.dumps(state.to_json(config, MASKS))), **changes}


def resumed(
    data: dict[str, Any] | None,
    config: TimelyFreezeConfig = CONFIG,
    schedule: PipelineSchedule = SCHEDULE,
    masks: StageMasks = MASKS,
) -> RunState:
    return compatible_state(data, config, schedule, masks, AUTO_WARMUP)


# --- there and back ------------------------------------------------------------------------------------------


def test_a_state_comes_back_from_json_as_it_was() -> None:
    state = planned_state(20)
    assert RunState.from_json(saved(state), SCHEDULE) == state
    assert resumed(saved(state)) == state


def test_a_state_without_a_plan_comes_back_too() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    state.completed_steps = 2
    assert resumed(saved(state)) == state
    assert resumed(saved(state)).phases.phase(3) is Phase.WARMUP


def test_a_run_that_begins_anew_in_every_step_keeps_its_newest_notes_only() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    planned = planned_state(20).plan
    assert planned is not None
    for step in range(1, 200):
        state.completed_steps = step
        state = state.restarted(CONFIG, "the pipeline schedule changed")
        state.turn_to(SCHEDULE)
        state.adopt(SCHEDULE, Planned(planned, 9.9, (f"a note of step {step}",)))
    assert len(state.notes) == 50
    assert state.notes[-1] == "a note of step 199"


# --- starting ------------------------------------------------------------------------------------------------


def test_a_fresh_run_takes_the_lengths_of_the_config() -> None:
    assert RunState.fresh(CONFIG, AUTO_WARMUP) == RunState(PhaseSchedule(5, 15, 35, mixed=True))


def test_warmup_auto_is_the_hosts() -> None:
    config = CONFIG.model_copy(update={"warmup_steps": "auto"})
    assert RunState.fresh(config, 7).phases == PhaseSchedule(7, 17, 37, mixed=True)


def test_without_a_state_the_run_starts_from_the_beginning() -> None:
    assert resumed(None) == RunState.fresh(CONFIG, AUTO_WARMUP)


@pytest.mark.parametrize(
    ("data", "steps"), [(saved(planned_state(20), format=FORMAT + 1), 20), ({"anything": "else"}, 0)]
)
def test_a_state_of_another_format_keeps_its_step_and_says_so(data: dict[str, Any], steps: int) -> None:
    state = resumed(data)
    start = max(steps, 5)  # the warm-up is not forgotten
    assert (state.completed_steps, state.plan) == (steps, None)
    assert state.phases == PhaseSchedule(start, start + 10, start + 30, mixed=True)
    assert "the checkpoint's state is of format" in state.notes[-1]


EXACT = TimelyFreezeConfig(warmup_steps=5, monitoring_steps=10, progressive_steps=20)


@pytest.mark.parametrize("completed", [3, 15, 20, 100])
def test_a_run_that_freezes_nothing_drops_the_progressive_steps_of_an_older_state(completed: int) -> None:
    older = planned_state(completed) if completed >= 15 else RunState.fresh(CONFIG, AUTO_WARMUP)
    older.completed_steps = completed
    state = resumed(saved(older, EXACT), EXACT)
    assert state.completed_steps == completed
    assert [state.phases.phase(step) is Phase.STABLE for step in (15, 16)] == [False, True]


# --- what no longer holds ------------------------------------------------------------------------------------


def other_units() -> StageMasks:
    units = {stage: [FreezeUnit((f"{stage}.other",), 4.0, (2, 2))] for stage in (0, 1)}
    return StageMasks(units, seed=0)


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": gpipe(2, 3)},
        {"schedule": one_f_one_b(3, 4)},
        {"masks": other_units()},
        {"config": CONFIG.model_copy(update={"max_freeze_ratio": 0.5})},
        {"config": CONFIG.model_copy(update={"freeze_limits": {"1.*": 0.4}})},
        {"config": CONFIG.model_copy(update={"method": "none"})},
    ],
    ids=["order", "stages", "parameters", "budget", "limits", "method"],
)
def test_a_plan_for_something_else_is_made_anew_and_the_step_stays(change: dict[str, Any]) -> None:
    state = resumed(saved(planned_state(20)), **change)
    assert state.completed_steps == 20
    assert state.plan is None
    assert state.measurement.times == {}
    ramp = 20 if change.get("config", CONFIG).freezes else 0
    assert state.phases == PhaseSchedule(20, 30, 30 + ramp, mixed=True)
    assert state.phases.phase(21) is Phase.MONITORING_UPPER
    assert state.notes[0] == "1B0: a note"
    assert state.notes[-1].startswith("monitoring began again after step 20: the checkpoint's plan is for another")


def test_a_plan_that_fills_the_memory_is_made_anew_in_every_run() -> None:
    """Sequences may be longer now, the limit lower, the device another: what fitted may not fit any more."""
    config = TimelyFreezeConfig(warmup_steps=5, monitoring_steps=10, extra_microbatches="auto", memory_limit=60.0)
    data = saved(planned_state(20), config)
    again = resumed(data, config)
    assert (again.completed_steps, again.plan) == (20, None)
    assert again.phases.warmup_end == 21  # step 21 checks the taps
    assert again.notes[-1].endswith("how many microbatches fit into memory is measured in every run")
    lower = config.model_copy(update={"memory_limit": 20.0})
    assert fingerprint(lower, SCHEDULE, MASKS) != fingerprint(config, SCHEDULE, MASKS)
    warming_up = RunState.fresh(config, AUTO_WARMUP)
    assert resumed(saved(warming_up, config), config) == warming_up


@pytest.mark.parametrize("facts", [{"moves_forwards": True, "microbatch_size": 4}, {"moves_forwards": False}])
def test_a_plan_for_other_facts_of_the_host_is_made_anew(facts: dict[str, Any]) -> None:
    before = {"moves_forwards": True, "microbatch_size": 2}
    state = planned_state(20)
    data = json.loads(json.dumps(state.to_json(CONFIG, MASKS, before)))
    again = compatible_state(data, CONFIG, SCHEDULE, MASKS, auto_warmup=AUTO_WARMUP, host=facts)
    assert (again.completed_steps, again.plan) == (20, None)
    assert "the checkpoint's plan is for m" in again.notes[-1]
    assert compatible_state(data, CONFIG, SCHEDULE, MASKS, auto_warmup=AUTO_WARMUP, host=before) == state
    older = without(data, "host", "checksum")
    assert compatible_state(older, CONFIG, SCHEDULE, MASKS, auto_warmup=AUTO_WARMUP, host=facts) == state


def test_without_limits_a_fingerprint_is_what_it_was_before_there_were_any() -> None:
    assert fingerprint(CONFIG, SCHEDULE, MASKS) == "8a65c4ca15902a83"
    halves = [CONFIG.model_copy(update={"freeze_limits": {"1.*": limit}}) for limit in (0.4, 0.5)]
    assert len({fingerprint(config, SCHEDULE, MASKS) for config in (CONFIG, *halves)}) == 3


def test_settings_that_the_plan_does_not_depend_on_may_change() -> None:
    changed = CONFIG.model_copy(update={"seed": 9, "replan_interval": 3, "output_dir": "elsewhere"})
    state = planned_state(20)
    assert resumed(saved(state), config=changed) == state


def test_monitoring_that_was_interrupted_starts_over() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    state.completed_steps = 8
    again = resumed(saved(state))
    assert again.completed_steps == 8
    assert again.phases == PhaseSchedule(8, 18, 38, mixed=True)
    assert again.notes == ("monitoring began again after step 8: a checkpoint interrupted it",)


def test_a_checkpoint_at_the_end_of_the_warmup_goes_on_without_a_note() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    state.completed_steps = 5
    again = resumed(saved(state))
    assert again == state
    assert again.phases.phase(6) is Phase.MONITORING_UPPER


def test_a_restart_in_the_warmup_keeps_the_rest_of_it() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    state.completed_steps = 2
    assert state.restarted(CONFIG, "why").phases == PhaseSchedule(5, 15, 35, mixed=True)


# --- the fingerprint -----------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_every_process_and_release() -> None:
    """Pinned: where it changes, every checkpoint's plan is made anew."""
    assert fingerprint(CONFIG, SCHEDULE, MASKS) == "8a65c4ca15902a83"


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize(
    ("data", "steps", "said"),
    [
        (saved(planned_state(20), completed_steps=21), 21, "was changed after it was saved"),
        (saved(planned_state(20), plans=[]), 20, "was changed after it was saved"),
        (without(saved(planned_state(20)), "plans", "checksum"), 20, "lacks 'plans'"),
        (saved(planned_state(20), completed_steps="many", checksum=None), 0, "was changed after it was saved"),
        (without(saved(planned_state(20), measurement=[1.0]), "checksum"), 20, "it: [1.0] is not a dictionary"),
        ([1, 2], 0, "is no object: [1, 2]"),
        ('{"format": 2, "completed', 0, 'is no object: \'{"format"'),
    ],
)
def test_a_state_that_was_edited_or_cut_off_is_said_and_monitoring_begins_anew(
    data: Any, steps: int, said: str
) -> None:
    state = resumed(data)
    assert state.plan is None
    assert state.completed_steps == steps
    assert state.phases.warmup_end >= steps
    assert f"the checkpoint's state {said}" in state.notes[-1]
    assert "\n" not in state.notes[-1]


def test_a_state_without_a_checksum_is_read_as_before() -> None:
    state = planned_state(20)
    assert resumed(without(saved(state), "checksum")) == state


def test_a_state_says_that_ranks_have_still_to_decide() -> None:
    state = RunState.fresh(CONFIG, AUTO_WARMUP)
    assert "undecided" not in state.to_json(CONFIG, MASKS)
    state.undecided = True
    assert RunState.from_json(state.to_json(CONFIG, MASKS), SCHEDULE).undecided
