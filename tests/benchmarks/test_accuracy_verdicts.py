"""What the accuracy study decides: within the spread of no freezing over seeds, and the Pareto front."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.figures import Spread
from benchmarks.accuracy.table import verdict_table
from benchmarks.accuracy.verdicts import Verdict, verdicts

TASK = {"name": "vit", "steps": 10, "warmup": 2, "monitoring": 2, "progressive": 0}


def run(method: str, accuracy: float, step_ms: float = 100.0, seed: int = 0, loss: float = 1.0) -> dict[str, Any]:
    """A run that ends at ``accuracy``; the host alone takes 100 ms a step."""
    return {
        "cell": {"task": "vit", "schedule": "1f1b", "method": method, "seed": seed, "settings": {}},
        "task": TASK,
        "curve": [[0, 3.0, 0.1], [10, loss, accuracy]],
        "pairs": [] if method == "none" else [[6, 100.0, step_ms]],
        "phases": [[1, ""]],
        "steps": 10,
        "stages": [],
        "planned_step_ratio": None,
    }


def of(records: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {variant: verdict for (_, _, variant), verdict in verdicts(records).items()}


def test_differences_are_to_no_freezing_of_the_same_seed() -> None:
    records = [run("none", 0.8), run("timely", 0.7), run("none", 0.9, seed=1), run("timely", 0.8, seed=1)]
    found = of(records)["timely"]
    assert found.off["accuracy"] == Spread(pytest.approx(-0.1), pytest.approx(0.0), 2)
    assert found.alone["accuracy"] == Spread(pytest.approx(0.85), pytest.approx(0.005**0.5), 2)


@pytest.mark.parametrize(("accuracy", "within"), [(0.95, True), (0.8, True), (0.77, False)])
def test_within_the_spread_is_no_more_than_a_deviation_below(accuracy: float, within: bool) -> None:
    records = [run("none", 0.8), run("none", 0.9, seed=1)]  # 0.85, deviation 0.07
    records += [run("timely", accuracy, seed=seed) for seed in (0, 1)]
    assert of(records)["timely"].within("accuracy") is within


@pytest.mark.parametrize(("loss", "within"), [(0.5, True), (1.6, True), (1.8, False)])
def test_of_a_loss_less_is_better(loss: float, within: bool) -> None:
    records = [run("none", 0.8, loss=0.5), run("none", 0.8, seed=1, loss=1.5)]  # 1.0, deviation 0.71
    records += [run("timely", 0.8, seed=seed, loss=loss) for seed in (0, 1)]
    assert of(records)["timely"].within("loss") is within


def test_one_seed_has_no_spread_to_be_within() -> None:
    assert of([run("none", 0.8), run("timely", 0.9)])["timely"].within("accuracy") is None


def test_a_method_is_beaten_by_those_that_are_as_accurate_and_as_fast_and_one_of_it_more() -> None:
    found = of([run("none", 0.9), run("timely", 0.8, 80.0), run("apf", 0.8, 90.0), run("autofreeze", 0.7, 50.0)])
    assert found["timely"].beaten_by == ()
    assert found["autofreeze"].beaten_by == ()  # less accurate, but faster
    assert found["apf"].beaten_by == ("timely",)


def test_a_method_that_is_no_faster_than_no_freezing_is_beaten_by_it() -> None:
    assert of([run("none", 0.9), run("apf", 0.8, 100.0)])["apf"].beaten_by == ("none",)


def test_equals_do_not_beat_each_other() -> None:
    found = of([run("none", 0.9), run("timely", 0.8, 80.0), run("apf", 0.8, 80.0)])
    assert found["timely"].beaten_by == found["apf"].beaten_by == ()


def test_the_table_names_what_was_decided() -> None:
    records = [run("none", 0.8), run("timely", 0.7, 80.0), run("none", 0.9, seed=1), run("timely", 0.8, 80.0, seed=1)]
    row = verdict_table(records).splitlines()[-1].split("  ")
    cells = [cell.strip() for cell in row if cell.strip()]
    assert cells == [
        "vit", "1f1b", "timely", "-0.1000 +- 0.0000", "0.0707", "no", "+0.0000 +- 0.0000", "0.0000", "yes", "1.250", "-"
    ]  # fmt: skip
