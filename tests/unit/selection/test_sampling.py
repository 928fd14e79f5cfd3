"""Samples of parameters, and the cumulative updates that are estimated from them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from snapshots import held_by, snapshot_of

from tf_adapters.selection.encoding import decode, encode
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.readers import Readers, sizes_of
from tf_adapters.selection.sampling import (
    READING_BYTES,
    PieceKey,
    read,
    sample_indices,
    sample_sizes,
    unpacked,
    whole_parameters,
)
from tf_adapters.selection.updates import Snapshot, Updates, by_stage, unit_places

KEY: PieceKey = (1, "layers.3.weight", ())
UNITS = {
    1: (FreezeUnit(("b.weight", "b.bias"), 12.0, (4, 2)),),
    0: (FreezeUnit(("a.weight",), 6.0, (3, 2)), FreezeUnit(("norm",), 2.0, (2,))),
}


def snapshot(**tensors: torch.Tensor) -> Snapshot:
    """Of whole tensors on stage 0, by name."""
    return snapshot_of({(0, name, ()): tensor for name, tensor in tensors.items()}, seed=7)


def sizes_for(numel: list[int], stages: list[int] | int = 0, readers: list[int] | int = 0) -> np.ndarray:
    """Of pieces of these stages and readers; of one of each by default."""
    whose = [np.array(of if isinstance(of, list) else [of] * len(numel), np.int64) for of in (stages, readers)]
    return sample_sizes(*whose, np.array(numel, np.int64))


def reading_bytes(sizes: np.ndarray) -> int:
    return int(8 * (sizes > 0).sum() + 4 * sizes.sum())


# --- how many elements, and which ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "size"), [(1, 1), (64, 64), (300, 256), (4096, 256), (100_000, 1000), (409_600, 4096), (10**9, 4096)]
)
def test_a_sample_is_a_percent_within_bounds(numel: int, size: int) -> None:
    assert sizes_for([numel]).tolist() == [size]
    indices = sample_indices(0, KEY, numel, size)
    assert len(indices) == size
    assert indices.min() >= 0
    assert indices.max() < numel
    assert np.all(np.diff(indices) >= 0)


@pytest.mark.parametrize("large", [4, 48, 500, 4000])
def test_a_reading_fits_its_bytes_and_large_samples_give_way_more_than_small_ones(large: int) -> None:
    sizes = sizes_for([10**6] * large + [1000] * 20)
    assert reading_bytes(sizes) <= READING_BYTES
    assert reading_bytes(sizes) > 0.75 * READING_BYTES
    assert len(set(sizes[:large].tolist())) == 1
    assert 1 <= sizes[-1] <= sizes[0] <= 4 * sizes[-1] + 1 or sizes[-1] == 256


def test_a_stage_has_as_many_elements_on_one_rank_as_cut_into_shards() -> None:
    whole = sizes_for([10**6] * 48)
    shards = sizes_for([10**6 // 16] * 48 * 16, readers=sorted([*range(16)] * 48))
    assert shards.sum() <= READING_BYTES / 4
    assert shards.sum() == pytest.approx(whole.sum(), rel=0.1)


def test_a_rank_of_several_stages_sends_no_more_than_one_of_one() -> None:
    sizes = sizes_for([10**6] * 48 * 4, stages=sorted([*range(4)] * 48))
    assert 0.9 * READING_BYTES < reading_bytes(sizes) <= READING_BYTES


def test_very_many_shards_have_an_element_each_however_many_ranks_they_are_on() -> None:
    sizes = sizes_for([1000] * 48 * 512, readers=sorted([*range(512)] * 48))
    assert set(sizes.tolist()) == {1}


def test_of_more_pieces_than_fit_some_are_read_and_they_are_spread_over_all() -> None:
    sizes = sizes_for([1000] * 20_000)
    assert 0.9 * READING_BYTES < reading_bytes(sizes) <= READING_BYTES
    assert set(sizes.tolist()) == {0, 1}
    assert set(np.diff(np.nonzero(sizes)[0]).tolist()) == {3, 4}


def test_the_sample_is_a_function_of_the_seed_and_of_what_it_is_of() -> None:
    indices = sample_indices(3, KEY, 10**6, 4096)
    assert np.array_equal(indices, sample_indices(3, KEY, 10**6, 4096))
    others = [(4, KEY), (3, (0, *KEY[1:])), (3, (1, "layers.4.weight", ())), (3, (*KEY[:2], (1,)))]
    assert all(not np.array_equal(indices, sample_indices(seed, key, 10**6, 4096)) for seed, key in others)


def test_every_element_is_as_likely_as_any_other() -> None:
    drawn = np.concatenate([sample_indices(seed, KEY, 5000, 256) for seed in range(4000)])
    counts = np.bincount(drawn, minlength=5000) / 4000
    expected = 256 / 5000
    assert np.abs(counts - expected).max() < 5.5 * np.sqrt(expected / 4000)


def test_a_small_piece_is_sampled_whole() -> None:
    assert sample_indices(0, KEY, 64, 64).tolist() == list(range(64))


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reading_is_the_sums_of_all_and_the_sampled_values(dtype: torch.dtype) -> None:
    tensors = {str(n): torch.randn(n, 300, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 40)}
    held = whole_parameters({0: tensors})
    sizes = {"1": 64, "40": 120}
    reading = read(7, (((0, name, ()), held(0, name)[0].values, size) for name, size in sizes.items()))
    assert len(reading) == 2 * 8 + (64 + 120) * 4
    totals, samples = unpacked(reading, 2)
    assert totals.tolist() == pytest.approx([float(tensor.double().sum()) for tensor in tensors.values()], abs=1e-9)
    assert samples.dtype == np.float32
    for (name, size), sample in zip(sizes.items(), np.split(samples, [64]), strict=True):
        indices = torch.from_numpy(sample_indices(7, (0, name, ()), tensors[name].numel(), size))
        assert np.array_equal(sample, tensors[name].flatten()[indices].float().numpy())


def test_nothing_held_is_nothing_read() -> None:
    assert read(0, []) == b""
    assert snapshot_of({}, {}).keys == ()


# --- who reads -----------------------------------------------------------------------------------------------


def test_the_first_rank_that_holds_a_piece_reads_it_and_the_others_are_told_nothing() -> None:
    first, second = ({(stage, f"{n}.w", ()): torch.full((40, 50), n + 1.0) for n in range(4)} for stage in (0, 1))
    held = [held_by(rank, sorted({key[:2] for key in (*first, *second)})) for rank in (second, first, second, first)]
    readers, told = Readers.of(held, sorted({key[:2] for key in (*first, *second)}))
    assert [bool(sizes) for sizes in told] == [True, True, False, False]
    assert sizes_of(told[0], 4) == [256] * 4
    assert sizes_of(told[2], 4) == [0] * 4
    assert readers.keys == (*first, *second)
    assert readers.pieces == (4, 4, 0, 0)


def test_a_snapshot_is_the_same_whoever_reads() -> None:
    pieces = {(stage, f"{n}.w", ()): torch.randn(100 + n, 50) for stage in (0, 1) for n in range(4)}
    alone = snapshot_of(pieces)
    keys = sorted(pieces, key=lambda key: key[1])
    for ranks in ((keys[:3], keys[2:], keys), (keys[5:], [], keys[:5])):
        together = snapshot_of(*({key: pieces[key] for key in rank} for rank in ranks))
        assert together.matches(alone)
        for name in ("totals", "samples"):
            assert np.array_equal(getattr(together, name), getattr(alone, name))


# --- updates -------------------------------------------------------------------------------------------------


def test_an_update_is_now_less_then() -> None:
    before, after = torch.zeros(4000), torch.linspace(-1, 2, 4000)
    places = {(0, "w"): 0}
    updates = Updates.between(snapshot(w=before), snapshot(w=after), places)
    indices = sample_indices(7, (0, "w", ()), 4000, 256)
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
        return snapshot_of({(0, "w", (0,)): flat[:2000], (0, "w", (2000,)): flat[2000:]}, seed=7)

    cut = Updates.between(sharded(then), sharded(now), names)
    assert cut.mean == pytest.approx(whole.mean)
    assert cut.numel == pytest.approx([12000])
    assert cut.mean_abs[0] == pytest.approx(float((now - then).abs().mean()), rel=0.2)


def test_units_are_counted_over_all_stages_and_hold_several_parameters() -> None:
    places = unit_places(UNITS)
    assert places == {(0, "a.weight"): 0, (0, "norm"): 1, (1, "b.weight"): 2, (1, "b.bias"): 2}
    assert by_stage(UNITS, [True, False, True]) == {0: frozenset({0}), 1: frozenset({0})}
    then = {(stage, name, ()): torch.zeros(4) for stage, name in places}
    now = {key: torch.full((4,), float(place)) for place, key in enumerate(then)}
    updates = Updates.between(snapshot_of(then), snapshot_of(now), places)
    assert updates.mean.tolist() == [0.0, 1.0, 2.5]
    assert updates.mean_abs.tolist() == [0.0, 1.0, 2.5]
    assert updates.numel.tolist() == [4, 4, 8]


def test_snapshots_of_another_sharding_or_seed_do_not_match() -> None:
    whole, other = snapshot(w=torch.zeros(100)), snapshot(w=torch.zeros(101))
    assert whole.matches(snapshot(w=torch.ones(100)))
    assert not whole.matches(other)
    assert not whole.matches(snapshot(v=torch.zeros(100)))
    assert not whole.matches(snapshot_of({(0, "w", ()): torch.ones(100)}, seed=8))


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
