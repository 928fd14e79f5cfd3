"""Samples of parameters, and the cumulative updates that are estimated from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tf_adapters.selection.encoding import decode, encode
from tf_adapters.selection.sampling import (
    PieceKey,
    PieceReading,
    read,
    sample_indices,
    sample_size,
    whole_parameters,
)
from tf_adapters.selection.units import FreezeUnit
from tf_adapters.selection.updates import Snapshot, Updates, by_stage, unit_places

KEY: PieceKey = (1, "layers.3.weight", ())
UNITS = {
    1: (FreezeUnit(("b.weight", "b.bias"), 12.0, (4, 2)),),
    0: (FreezeUnit(("a.weight",), 6.0, (3, 2)), FreezeUnit(("norm",), 2.0, (2,))),
}


def snapshot(**tensors: torch.Tensor) -> Snapshot:
    """Of whole tensors on stage 0, by name."""
    return Snapshot.of(read(7, (((0, name, ()), tensor) for name, tensor in tensors.items())), 7)


# --- which elements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "size"), [(1, 1), (64, 64), (300, 256), (4096, 256), (100_000, 1000), (409_600, 4096), (10**9, 4096)]
)
def test_a_sample_is_a_percent_within_bounds(numel: int, size: int) -> None:
    assert sample_size(numel) == size
    indices = sample_indices(0, KEY, numel)
    assert len(indices) == size
    assert indices.min() >= 0
    assert indices.max() < numel
    assert np.all(np.diff(indices) >= 0)


def test_the_sample_is_a_function_of_the_seed_and_of_what_it_is_of() -> None:
    indices = sample_indices(3, KEY, 10**6)
    assert np.array_equal(indices, sample_indices(3, KEY, 10**6))
    others = [(4, KEY), (3, (0, *KEY[1:])), (3, (1, "layers.4.weight", ())), (3, (*KEY[:2], (1,)))]
    assert all(not np.array_equal(indices, sample_indices(seed, key, 10**6)) for seed, key in others)


def test_every_element_is_as_likely_as_any_other() -> None:
    drawn = np.concatenate([sample_indices(seed, KEY, 5000) for seed in range(4000)])
    counts = np.bincount(drawn, minlength=5000) / 4000
    expected = sample_size(5000) / 5000
    assert np.abs(counts - expected).max() < 5.5 * np.sqrt(expected / 4000)


def test_a_small_piece_is_sampled_whole() -> None:
    assert sample_indices(0, KEY, 256).tolist() == list(range(256))


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reading_is_the_sampled_values_and_the_sum_of_all(dtype: torch.dtype) -> None:
    tensors = {(0, str(n)): torch.randn(n, 300, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 40)}
    held = whole_parameters({0: {name: tensor for (_, name), tensor in tensors.items()}})
    keyed = [((0, name, ()), held(0, name)[0].values) for _, name in tensors]
    readings = read(7, keyed)
    for (stage, name), tensor in tensors.items():
        reading = readings[stage, name, ()]
        indices = torch.from_numpy(sample_indices(7, (stage, name, ()), tensor.numel()))
        assert reading.numel == tensor.numel()
        assert reading.total == pytest.approx(float(tensor.double().sum()), abs=1e-9)
        assert np.array_equal(reading.sample, tensor.flatten()[indices].float().numpy())
        assert reading.sample.dtype == np.float32


def test_nothing_held_is_nothing_read() -> None:
    assert read(0, []) == {}
    assert read(0, [((0, "empty", ()), torch.zeros(0))]) == {}


# --- updates -------------------------------------------------------------------------------------------------


def test_an_update_is_now_less_then() -> None:
    before, after = torch.zeros(4000), torch.linspace(-1, 2, 4000)
    places = {(0, "w"): 0}
    updates = Updates.between(snapshot(w=before), snapshot(w=after), places)
    indices = sample_indices(7, (0, "w", ()), 4000)
    assert np.array_equal(updates.delta, after.numpy()[indices].astype(np.float64))
    assert updates.mean == pytest.approx([0.5])
    assert updates.sums(np.ones(len(indices))) == pytest.approx([4000.0])
    assert updates.mean_abs[0] == pytest.approx(float(after.abs().mean()), rel=0.1)


def test_shards_of_a_parameter_add_up_to_it() -> None:
    then, now = torch.randn(2, 6000), torch.randn(2, 6000)
    names = {(0, "w"): 0}
    whole = Updates.between(snapshot(w=then), snapshot(w=now), names)

    def sharded(tensor: torch.Tensor) -> Snapshot:
        flat = tensor.flatten()
        return Snapshot.of(read(7, [((0, "w", (0,)), flat[:2000]), ((0, "w", (2000,)), flat[2000:])]), 7)

    cut = Updates.between(sharded(then), sharded(now), names)
    assert cut.mean == pytest.approx(whole.mean)
    assert cut.numel == pytest.approx([12000])
    assert cut.mean_abs[0] == pytest.approx(float((now - then).abs().mean()), rel=0.2)


def test_units_are_counted_over_all_stages_and_hold_several_parameters() -> None:
    places = unit_places(UNITS)
    assert places == {(0, "a.weight"): 0, (0, "norm"): 1, (1, "b.weight"): 2, (1, "b.bias"): 2}
    assert by_stage(UNITS, [True, False, True]) == {0: frozenset({0}), 1: frozenset({0})}
    readings = {(s, n, ()): PieceReading(4, 0.0, np.zeros(4, np.float32)) for s, n in places}
    moved = {key: PieceReading(4, 4.0 * i, np.full(4, i, np.float32)) for i, key in enumerate(readings)}
    updates = Updates.between(Snapshot.of(readings, 0), Snapshot.of(moved, 0), places)
    assert updates.mean.tolist() == [0.0, 1.0, 2.5]
    assert updates.mean_abs.tolist() == [0.0, 1.0, 2.5]
    assert updates.numel.tolist() == [4, 4, 8]


def test_snapshots_of_another_sharding_or_seed_do_not_match() -> None:
    whole, other = snapshot(w=torch.zeros(100)), snapshot(w=torch.zeros(101))
    assert whole.matches(snapshot(w=torch.ones(100)))
    assert not whole.matches(other)
    assert not whole.matches(snapshot(v=torch.zeros(100)))
    assert not whole.matches(Snapshot.of(read(8, [((0, "w", ()), torch.ones(100))]), 8))


# --- through a checkpoint ------------------------------------------------------------------------------------


def test_a_snapshot_comes_back_from_json_bit_for_bit() -> None:
    taken = snapshot(w=torch.randn(5000), v=torch.randn(3))
    again = Snapshot.from_json(json.loads(json.dumps(taken.to_json())))
    assert again.matches(taken)
    for name in ("numel", "sizes", "totals", "samples"):
        assert np.array_equal(getattr(again, name), getattr(taken, name))
        assert getattr(again, name).dtype == getattr(taken, name).dtype


@pytest.mark.parametrize("array", [np.array([1.5, np.nan, -np.inf]), np.arange(3), np.zeros(0, np.float32)])
def test_arrays_come_back_from_json(array: np.ndarray) -> None:
    again = decode(json.loads(json.dumps(encode(array))))
    assert again.dtype == array.dtype
    assert np.array_equal(again, array, equal_nan=array.dtype.kind == "f")
