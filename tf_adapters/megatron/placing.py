"""Tell Megatron that chunks are in a V, before it makes process groups and models.

Megatron asks a few functions which rank has the first stage, which ranks hold embeddings, and which layers a chunk has.
These are patched. Everything else follows from their answers. If the embedding and the output layer share a weight, the
last rank has two copies of it. Both start with the same values, and their gradients are added without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_patches import first_stage, layer_layout, parallel_groups, tied_embeddings
from megatron_patches.patch import revert_all
from tf_adapters.errors import UnsupportedError
from tf_adapters.megatron.chunks import innermost
from tf_adapters.megatron.entry import patch_schedules
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.placement import VLayout, is_in_v

__all__ = ["place_in_v"]

CHECKED = "0.16."
"""The versions of Megatron-Core with which a V was run."""

_PATCHES = (*first_stage.PATCHES, *parallel_groups.PATCHES, *layer_layout.PATCHES, *tied_embeddings.PATCHES)


@patching()
def place_in_v() -> Callable[[], None]:
    """Put the two chunks of each rank into a V, in all models that this process builds from now on.

    Call it on all ranks before ``initialize_model_parallel``, which needs a virtual size of 2. The TransformerConfig
    needs a ``pipeline_model_parallel_layout``: a string with two stages for each rank, from the first stage to the
    last. Returns a function that reverts it.

    Raises:
        UnsupportedError: this version of Megatron-Core was not checked, process groups exist already, or a symbol is
            missing.
    """
    version = metadata.version("megatron-core")
    if not version.startswith(CHECKED):
        raise UnsupportedError(
            f'placement "v" was checked with Megatron-Core {CHECKED}x only, and this is {version}: use placement '
            '"host" here'
        )
    if parallel_state.model_parallel_is_initialized() and not first_stage.OF_GROUP.applied:
        raise UnsupportedError('placement "v" comes too late: Megatron has made its process groups already')
    patch_schedules()  # they stay: a loop may hold a wrapped function
    new = [patch for patch in _PATCHES if not patch.applied]
    for patch in _PATCHES:
        patch.check()
    first_stage.apply(
        of_group=lambda run, group: get_pg_rank(group) == get_pg_size(group) - 1,
        of_rank=_has_first_stage,
    )
    parallel_groups.apply(lambda ranks: [ranks[-1]])
    layer_layout.apply(_layout)
    tied = _TiedWeights()
    tied_embeddings.apply(tied.start, tied.add_gradients)
    return patching()(lambda: revert_all(new))


@functools.lru_cache
def _layout(layout: str, size: int) -> VLayout:
    return VLayout(layout, size)


def _has_first_stage(run: Callable[[], bool], ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Answer ``is_pipeline_first_stage`` as Megatron does, but for the last rank instead of the first."""
    if not ignore_virtual and parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
        if vp_stage != 0:
            return False
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


class _TiedWeights:
    """Copies of one weight in the first and the last stage, which are on one rank."""

    def __init__(self) -> None:
        self._embedding: torch.nn.Parameter | None = None  # of the newest first stage

    def start(self, module: Any) -> None:
        """Give the output layer of a last stage the weights of the first stage, which was built before it."""
        if not module.share_embeddings_and_output_weights:
            return
        if module.pre_process and not module.post_process:
            self._embedding = module.shared_embedding_or_output_weight()
        elif module.post_process and self._embedding is not None:
            module.shared_embedding_or_output_weight().data.copy_(self._embedding.data)
            self._embedding = None

    @staticmethod
    def add_gradients(model: Sequence[Any]) -> None:
        """Add the gradients of both copies, as an all-reduce over two ranks does. Both copies get the sum."""
        weights = [weight for chunk in model if (weight := _tied_weight(chunk)) is not None]
        if len(weights) < 2:
            return
        name = "main_grad" if getattr(weights[0], "main_grad", None) is not None else "grad"
        found = [gradient for weight in weights if (gradient := getattr(weight, name)) is not None]
        if not found:
            return
        total = sum(found[1:], found[0])
        for weight in weights:
            if getattr(weight, name) is None:
                setattr(weight, name, total.clone())
            else:
                getattr(weight, name).copy_(total)


def _tied_weight(chunk: Any) -> torch.nn.Parameter | None:
    module: Any = innermost(chunk)
    tied = is_in_v(getattr(module, "config", None)) and getattr(module, "share_embeddings_and_output_weights", False)
    if not tied or not (module.pre_process or module.post_process):
        return None
    return module.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
