"""Kept tensors stay as they were, whoever writes to the memory that they came from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tf_adapters.weight_gradients.kept import Kept, seal

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.mul_(2.0),
    "a view": lambda t: t.unsqueeze(0).add_(1.0),
    "past the version counter": lambda t: t.data.zero_(),
    "numpy": lambda t: t.numpy().fill(3.0),
    "another package": lambda t: torch.from_dlpack(t).zero_(),
    "a fused optimizer": lambda t: torch._foreach_add_([t], 1.0),
}


@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("sealed", [False, True])
def test_a_write_to_the_original_changes_nothing_that_is_kept(write: str, sealed: bool) -> None:
    original = torch.randn(4, 6)
    before, kept = original.clone(), Kept(original)
    copied = seal([kept]) if sealed else 0
    WRITES[write](original)
    assert torch.equal(kept.tensor, before)
    assert not torch.equal(original, before)
    assert copied == (original.nbytes if sealed else 0)


def test_a_pointer_that_is_older_than_the_kept_tensor_reaches_no_sealed_one() -> None:
    original = torch.randn(4, 6)
    view, before = original.numpy(), original.clone()
    kept = Kept(original)
    assert seal([kept]) == original.nbytes
    view[:] = 0.0
    assert torch.equal(kept.tensor, before)
    assert not original.any()  # the original still has its own memory


def test_memory_of_ours_alone_is_not_copied() -> None:
    original = torch.randn(4, 6)
    address, kept = original.data_ptr(), Kept(original)
    del original
    assert seal([kept]) == 0
    assert kept.tensor.data_ptr() == address


def test_memory_that_torch_has_not_allocated_is_copied_at_once() -> None:
    array = np.ones((2, 3), dtype=np.float32)
    kept = Kept(torch.from_numpy(array))
    array[:] = 0.0
    assert kept.tensor.all()
    assert seal([kept]) == 0


def test_a_small_part_of_a_large_buffer_is_copied_and_the_buffer_left_alone() -> None:
    buffer = torch.randn(100, 6)
    address = buffer.data_ptr()
    kept, before = Kept(buffer[:2]), buffer[:2].clone()
    buffer.zero_()
    assert torch.equal(kept.tensor, before)
    assert buffer.data_ptr() == address


def test_parts_of_one_storage_are_copied_each_with_its_own_values_and_strides() -> None:
    original = torch.randn(4, 6)
    parts = [original[0:1], original[1:2], original.t(), original[:, 1:3], original[:1].expand(3, 6), original]
    kept = [Kept(part) for part in parts]
    seal(kept)
    for part, copy in zip(parts, kept, strict=True):
        assert torch.equal(copy.tensor, part)
        assert copy.tensor.stride() == part.stride()
        assert copy.tensor.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_one_tensor_that_is_kept_several_times_is_copied_once() -> None:
    original = torch.randn(4, 6)
    kept = [Kept(original) for _ in range(3)]
    assert seal(kept) == original.nbytes
    assert len({copy.tensor.data_ptr() for copy in kept}) == 1


def test_a_tensor_that_changed_between_two_times_has_two_values() -> None:
    original = torch.ones(4, 6)
    first = Kept(original)
    original.mul_(2.0)
    second = Kept(original)
    seal([first, second])
    assert (first.tensor == 1.0).all()
    assert (second.tensor == 2.0).all()


def test_a_kept_tensor_requires_no_gradient_and_may_be_empty() -> None:
    kept = [Kept(torch.ones(2, 3, requires_grad=True)), Kept(torch.ones(0, 3))]
    seal(kept)
    assert not any(of.tensor.requires_grad for of in kept)
