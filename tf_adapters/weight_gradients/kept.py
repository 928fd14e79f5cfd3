"""Tensors that wait for their weight gradient, and that nobody else can change meanwhile.

Between the backward that saves a tensor and the weight gradient that reads it, other code may write to the tensor's
memory: a function that changes its gradient in place, a ``.grad`` that is a view of it, a buffer that is filled again.

A small part of a larger storage is copied at once. While the backward runs, any other kept tensor is a copy-on-write
clone, if torch can make one. Whoever writes through torch to the original gets new memory, so nothing is copied unless
somebody writes. When the backward has ended, ``seal`` looks who else still holds the original. If nobody does, the
memory is ours alone. Otherwise it is copied, since its holder may also write to it by a pointer, which copy-on-write
does not see.
Source: c10/core/impl/cow/COW.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_MOST_SHARED = 4
"""The most bytes of a storage per byte of the tensor in it. In a larger one, a shared buffer, the tensor is copied."""

_Place = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]
"""The address of a tensor's storage, and the type, offset, shape and strides of the tensor in it."""


class Kept:
    """One tensor as it was when it was kept; ``tensor`` requires no gradient."""

    __slots__ = ("_original", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._original: torch.UntypedStorage | None = None
        source = tensor.detach() if torch.is_grad_enabled() else tensor
        storage = source.untyped_storage()
        if storage.nbytes() > _MOST_SHARED * source.nbytes:
            self.tensor = _copy(source)
            return
        try:
            self.tensor = torch._lazy_clone(source)
        except (AttributeError, RuntimeError):  # an old torch, or memory that torch has not allocated itself
            self.tensor = _copy(source)
        else:
            self._original = storage


def seal(tensors: Iterable[Kept]) -> int:
    """Make the memory of these tensors ours alone. Return the bytes copied here, without the copies made at once."""
    copies: dict[_Place, torch.Tensor] = {}
    copied = 0
    for kept in tensors:
        original, kept._original = kept._original, None
        if original is None or not _is_held(original):
            continue
        tensor = kept.tensor
        place = _place(tensor)
        if place not in copies:
            copies[place] = _copy(tensor)
            copied += copies[place].untyped_storage().nbytes()
        kept.tensor = copies[place]
    return copied


def _is_held(storage: torch.UntypedStorage) -> bool:
    """Return whether any tensor holds this storage. Our only reference is the storage's Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata)) > 1


def _place(tensor: torch.Tensor) -> _Place:
    """Return where a tensor is. ``data_ptr`` would copy its values, since the caller may write to them."""
    address = int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
    return address, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides, so that a product of it has the same bits."""
    shape: Sequence[int] = tensor.shape
    strides: Any = tensor.stride()
    if tensor.numel() == 0:
        return tensor.clone()
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return tensor.as_strided((length,), (1,)).clone().as_strided(shape, strides)
