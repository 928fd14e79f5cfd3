"""Errors of ``megatron_patches``, which knows nothing of this package, as errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_patches.patch import PatchError
from tf_adapters.errors import UnsupportedError


@contextmanager
def patching() -> Iterator[None]:
    """Raise UnsupportedError, with the same line, where a patch cannot be applied or taken back."""
    try:
        yield
    except PatchError as error:
        raise UnsupportedError(str(error)) from None
