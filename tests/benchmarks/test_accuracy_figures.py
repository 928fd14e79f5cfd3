"""The accuracy study's figures: time in baseline steps, kappa, p_eff, equal time, time to a loss, summaries."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.figures import (
    Spread,
    clock,
    figures,
    first_time_at,
    interpolate,
    p_eff,
    phases_of,
    relative_times,
    summarise,
)
from benchmarks.accuracy.table import table

TASK = {"name": "vit", "steps": 10, "warmup": 2, "monitoring": 2, "progressive": 0}


def record(method: str, curve: list[list[float]], seed: int = 0, **more: Any) -> dict[str, Any]:
    cell = {"task": "vit", "schedule": "1f1b", "method": method, "seed": seed, "settings": {}}
    return {"cell": cell, "task": TASK, "curve": curve, "pairs": [], "stages": [], "planned_step_ratio": None, **more}


def baseline(seed: int = 0, last: float = 1.0) -> dict[str, Any]:
    return record("none", [[0, 3.0, 0.1], [5, 2.0, 0.5], [10, last, 0.8]], seed)


def freezing(seed: int = 0) -> dict[str, Any]:
    """Half as fast in warm-up as it should be in the pairs, twice as fast once it freezes (after step 4)."""
    stage = {
        "frozen_share": [0.0] * 4 + [0.5] * 16,
        "parameters": {},
        "probes": [[1, 2.0, 2.0, 5.0, 5.0], [9, 1.0, 4.0, 2.0, 8.0]],
    }
    other = {
        "frozen_share": [0.0] * 4 + [0.7] * 16,
        "parameters": {},
        "probes": [[1, 1.0, 1.0, 5.0, 5.0], [9, 2.0, 2.0, 2.0, 2.0]],
    }
    return record(
        "timely",
        [[0, 3.0, 0.1], [5, 2.5, 0.4], [10, 1.5, 0.6], [15, 1.0, 0.7], [20, 0.9, 0.8]],
        seed,
        steps=20,
        phases=[[1, "warmup"], [5, "stable"]],
        pairs=[[1, 100.0, 100.0], [6, 100.0, 50.0], [8, 200.0, 100.0]],
        stages=[stage, other],
    )


def test_a_step_lasts_what_the_nearest_pairs_of_its_phase_say() -> None:
    phases = ["a"] * 2 + ["b"] * 3
    assert relative_times(phases, [(1, 10, 10), (3, 10, 5), (4, 10, 6), (5, 10, 7)]) == [1, 1, 0.6, 0.6, 0.6]


def test_a_phase_without_pairs_takes_the_nearest_of_the_others() -> None:
    assert relative_times(["a", "b"], [(1, 10, 5)]) == [0.5, 0.5]


def test_without_pairs_a_step_is_a_baseline_step() -> None:
    assert clock(["", ""], []) == [0, 1, 2]


def test_a_slow_moment_of_the_machine_does_not_count() -> None:
    fair, slow = [(n, 10, 5) for n in (1, 2, 3)], [(1, 10, 5), (2, 70, 35), (3, 10, 5)]
    assert clock([""] * 3, fair) == clock([""] * 3, slow) == [0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(("at", "value"), [(0, 1.0), (5, 2.0), (10, 3.0), (15, 2.0), (20, 1.0), (20.1, None)])
def test_values_between_points_lie_on_the_line(at: float, value: float | None) -> None:
    assert interpolate(at, [0, 10, 20], [1.0, 3.0, 1.0]) == value


@pytest.mark.parametrize(("level", "time"), [(3.0, 0), (2.5, 2.5), (2.0, 5), (1.0, 7.5), (0.0, 10), (-0.5, None)])
def test_the_first_time_a_loss_is_reached(level: float, time: float | None) -> None:
    assert first_time_at(level, [0, 5, 10, 15], [3.0, 2.0, 0.0, 1.0]) == time


def test_p_eff_is_the_updated_share_of_the_gradients_energy_over_all_stages_and_probes() -> None:
    run = freezing()
    assert p_eff(run) == pytest.approx((2 + 1 + 1 + 2) / (2 + 1 + 4 + 2))
    assert p_eff(run, after=4) == pytest.approx((1 + 2) / (4 + 2))
    assert p_eff(run, after=4, of_batches=True) == pytest.approx((2 + 2) / (8 + 2))
    assert p_eff(run, after=9) is None


def test_phases_by_step() -> None:
    assert phases_of(freezing()) == ["warmup"] * 4 + ["stable"] * 16


def test_figures_of_a_run_that_is_twice_as_fast_in_stable_freezing() -> None:
    found = figures(freezing(), baseline())
    assert (found.accuracy, found.loss) == (0.6, 1.5)  # at step 10
    # 4 steps at 1 and 12 at 0.5 make the baseline's 10: step 16.
    assert found.accuracy_at_time == pytest.approx(0.7 + 0.1 / 5)
    assert found.loss_at_time == pytest.approx(1.0 - 0.1 / 5)
    assert (found.kappa, found.throughput, found.kappa_run) == (0.5, 2.0, pytest.approx(0.7))
    assert found.p_eff == pytest.approx(0.5)
    assert found.kappa_below_p_eff == 0.0  # 0.5 is not below 0.5
    assert found.freeze_ratio == pytest.approx(0.6)
    assert found.steps_to_loss == pytest.approx(1.5)
    assert found.time_to_loss == pytest.approx((4 + 11 * 0.5) / 10)


def test_the_lowest_loss_is_of_the_tasks_steps_only() -> None:
    overfitted = record("none", [[0, 3.0, 0.1], [5, 1.2, 0.5], [10, 1.4, 0.5], [15, 1.0, 0.5]])
    found = figures(overfitted, baseline())
    assert (found.lowest_loss, found.loss) == (1.2, 1.4)


def test_a_loss_that_is_never_reached_has_no_time() -> None:
    found = figures(freezing(), baseline(last=0.5))
    assert found.time_to_loss is None
    assert found.steps_to_loss is None


def test_the_baseline_itself_has_no_ratios() -> None:
    found = figures(baseline(), baseline())
    assert (found.accuracy_at_time, found.kappa, found.p_eff, found.kappa_below_p_eff) == (0.8, None, None, None)


def test_spread_counts_only_what_is_known() -> None:
    assert Spread.of([1.0, None, 3.0]) == Spread(2.0, pytest.approx(2**0.5), 2)
    assert Spread.of([1.0]) == Spread(1.0, 0.0, 1)
    assert Spread.of([None]) is None


def test_summaries_are_over_seeds_and_leave_out_runs_without_their_baseline() -> None:
    found = summarise([baseline(0), freezing(0), baseline(1), freezing(1), freezing(2)])
    assert set(found) == {("vit", "1f1b", "none"), ("vit", "1f1b", "timely")}
    assert found["vit", "1f1b", "timely"]["kappa"] == Spread(0.5, 0.0, 2)


def test_the_table_says_how_many_runs_have_a_value() -> None:
    text = table([baseline(0), freezing(0), baseline(1, last=0.5), freezing(1)])
    row = next(line for line in text.splitlines() if "timely" in line)
    assert "60.0% +- 0.0%" in row
    assert "0.950 (1)" in row  # the time to the loss of the first seed's baseline
