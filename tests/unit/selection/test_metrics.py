"""APF and AutoFreeze against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from snapshots import snapshot_of

from tf_adapters.selection.apf import ALPHA, Apf
from tf_adapters.selection.autofreeze import AutoFreeze, layers_of
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.updates import Updates


def updates_of(*deltas: torch.Tensor) -> Updates:
    """Updates of one tensor per unit."""
    places = {(0, str(i)): i for i in range(len(deltas))}
    taken = [
        snapshot_of({(0, str(i), ()): tensor for i, tensor in enumerate(tensors)})
        for tensors in ([torch.zeros_like(d) for d in deltas], deltas)
    ]
    return Updates.between(*taken, places)


def run(metric: Apf | AutoFreeze, steps: list[Updates]) -> list[list[bool]]:
    memory: dict[str, np.ndarray] = {}
    found = []
    for updates in steps:
        memory, stable = metric.check(memory, updates)
        found.append(stable.tolist())
    return found


# --- APF -----------------------------------------------------------------------------------------------------


def full_score(deltas: list[torch.Tensor]) -> float:
    """The paper's formula over every element."""
    trend = size = torch.zeros(())
    for delta in deltas:
        trend, size = ALPHA * trend + (1 - ALPHA) * delta.mean(), ALPHA * size + (1 - ALPHA) * delta.abs().mean()
    return float(trend.abs() / size)


@pytest.mark.parametrize("drift", [0.0, 0.3, 2.0])
def test_the_sampled_score_is_close_to_the_formula_over_every_element(drift: float) -> None:
    generator = torch.Generator().manual_seed(1)
    deltas = [drift + torch.randn(300_000, generator=generator) for _ in range(6)]
    full = full_score(deltas)
    margin = 0.05 * full + 1e-6
    memory: dict[str, np.ndarray] = {}
    for threshold, expected in ((full + margin, True), (full - margin, False)):
        apf = Apf(threshold, periods=False)
        memory = {}
        for delta in deltas:
            memory, stable = apf.check(memory, updates_of(delta))
        assert stable.tolist() == [expected]


def test_oscillation_is_stable_and_a_trend_is_not() -> None:
    ups, downs, trend = torch.full((2000,), 1.0), torch.full((2000,), -1.0), torch.full((2000,), 0.01)
    steps = [updates_of(ups if k % 2 else downs, trend) for k in range(12)]
    assert run(Apf(0.1, periods=False), steps)[-1] == [True, False]


def test_what_never_moves_is_stable_and_a_threshold_of_0_freezes_nothing() -> None:
    still = [updates_of(torch.zeros(100))] * 2
    assert run(Apf(0.5, periods=False), still) == [[True], [True]]
    assert run(Apf(0.0, periods=False), still) == [[False], [False]]


def test_what_is_not_finite_is_never_stable() -> None:
    broken = [updates_of(torch.full((300,), torch.inf), torch.full((300,), torch.nan), torch.zeros(300))] * 3
    assert run(Apf(1.0, periods=False), broken)[-1] == [False, False, True]
    assert run(AutoFreeze(np.arange(3), 66.7), broken)[-1] == [False] * 3


def test_alone_it_freezes_one_check_longer_each_time_and_thaws_for_one_interval() -> None:
    """Periods of 1, 2, 3 checks, each after an interval of training: APF's additive increase."""
    still = updates_of(torch.zeros(100))
    frozen = [step[0] for step in run(Apf(0.5, periods=True), [still] * 9)]
    assert frozen == [True, False, True, True, False, True, True, True, False]


def test_alone_it_halves_the_period_of_what_became_unstable() -> None:
    apf = Apf(0.5, periods=True, alpha=0.0)
    memory = {name: np.array([value]) for name, value in {"period": 4, "waiting": 0}.items()}
    memory, stable = apf.check(memory, updates_of(torch.ones(100)))
    assert (stable.tolist(), memory["period"].tolist(), memory["waiting"].tolist()) == ([True], [2], [2])
    for expected in ([True], [False]):
        memory, stable = apf.check(memory, updates_of(torch.zeros(100)))
        assert stable.tolist() == expected
    memory, stable = apf.check(memory, updates_of(torch.ones(100)))
    assert (stable.tolist(), memory["period"].tolist()) == ([True], [1])


def test_what_was_frozen_all_the_time_keeps_its_averages() -> None:
    apf = Apf(0.9, periods=True, alpha=0.5)
    memory, _ = apf.check({}, updates_of(torch.cat([torch.ones(50), -torch.ones(50)])))
    later, _ = apf.check(memory, updates_of(torch.zeros(100)))
    assert memory["waiting"].tolist() == [1]
    assert np.array_equal(later["size"], memory["size"])


# --- AutoFreeze ----------------------------------------------------------------------------------------------

FOUR = np.arange(4)


def norms(*values: float) -> Updates:
    return updates_of(*(torch.full((100,), value) for value in values))


def test_the_first_check_has_nothing_to_compare_with() -> None:
    assert run(AutoFreeze(FOUR, 80.0), [norms(1, 1, 1, 1)]) == [[False] * 4]


def test_the_prefix_of_layers_that_changed_least_is_stable() -> None:
    steps = [norms(1, 1, 1, 1), norms(1.1, 1.2, 2, 1.3)]
    assert run(AutoFreeze(FOUR, 75.0), steps)[-1] == [True, True, False, False]  # 2 is the greatest change
    assert run(AutoFreeze(FOUR, 25.0), steps)[-1] == [True, False, False, False]
    assert run(AutoFreeze(FOUR, 100.0), steps)[-1] == [True] * 4
    assert run(AutoFreeze(FOUR, 0.0), steps)[-1] == [False] * 4


def test_a_layer_whose_predecessor_is_not_stable_is_not_either() -> None:
    assert run(AutoFreeze(FOUR, 75.0), [norms(1, 1, 1, 1), norms(9, 1, 1, 1)])[-1] == [False] * 4


def test_the_prefix_only_grows_and_never_beyond_the_percentile() -> None:
    steps = [norms(1, 1, 1, 1), norms(1, 1, 9, 5), norms(9, 9, 9, 90), norms(0, 0, 1, 90)]
    found = run(AutoFreeze(FOUR, 75.0), steps)
    assert [sum(stable) for stable in found] == [0, 2, 3, 3]


def test_a_layer_that_begins_to_move_is_unstable_and_one_at_rest_is_not() -> None:
    assert run(AutoFreeze(FOUR, 75.0), [norms(0, 0, 1, 1), norms(0, 3, 1, 1)])[-1] == [True, False, False, False]


def test_the_norm_of_a_sampled_layer_is_close_to_its_own() -> None:
    delta = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    memory, _ = AutoFreeze(np.zeros(2, np.int64), 80.0).check({}, updates_of(delta, 3 * delta))
    assert memory["norms"][0] == pytest.approx(float(delta.norm()) * np.sqrt(10), rel=0.1)


def test_layers_are_named_up_to_their_first_number_and_counted_over_the_stages() -> None:
    names = {
        0: ["tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.mlp.2.bias", "layers.1.w"],
        1: ["layers.1.w", "norm.weight", "head", "scale"],
    }
    units = {stage: [FreezeUnit((name,), 1.0, (1,)) for name in of_stage] for stage, of_stage in names.items()}
    assert layers_of(units).tolist() == [0, 1, 1, 2, 3, 4, 5, 6]
    assert layers_of({0: [FreezeUnit(("0.weight",), 1.0, (1,)), FreezeUnit(("0.bias",), 1.0, (1,))]}).tolist() == [0, 0]
