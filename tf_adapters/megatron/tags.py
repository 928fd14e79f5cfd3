"""Mark a forward's output with what ran it, so that the host's backward finds it."""

from __future__ import annotations

from typing import Any

import torch

from tf_adapters.megatron.chunks import Chunk

_TAG = "timely_freeze_action"  # attribute of the tensor


def tag(output: Any, value: tuple[Any, Chunk, int]) -> None:
    """Mark a forward's output with its chunk and microbatch, since the host passes nothing else to the backward.

    Pipelines of several modules (0.17 on) have dicts as outputs, which take no tag. Their backwards run unmasked, and
    the check of the executed order ends freezing before any mask is drawn.
    """
    tensor = output[0] if isinstance(output, list) else output
    if isinstance(tensor, torch.Tensor):
        setattr(tensor, _TAG, value)


def tagged(output: Any) -> tuple[Any, Chunk, int] | None:
    """Remove and return the mark that ``tag`` left on a forward's output; None if the output has no mark."""
    tensor = output[0] if isinstance(output, list) else output
    return vars(tensor).pop(_TAG, None) if isinstance(tensor, torch.Tensor) else None
