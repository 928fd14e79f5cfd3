"""Tell Megatron that chunks are in a V (``placement``), before it makes process groups and models.

Megatron asks a few functions which rank has the first stage, which ranks hold embeddings, and which layers a chunk has.
These are patched. Everything else follows from their answers. The embedding and the output layer are on one rank: where
they share a weight, its two copies start equal, and their gradients are added, without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_patches import first_stage, layer_layout, microbatch_data, parallel_groups, tied_embeddings
from megatron_patches.patch import revert_all
from tf_adapters.config import SECTION
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.log import announce
from tf_adapters.megatron.entry import patch_schedules
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.placement import VLayout, even_layout

__all__ = ["place_arguments", "place_in_v"]

CHECKED = "0.16."
"""The versions of Megatron-Core with which a V was run."""

_PATCHES = (*first_stage.PATCHES, *parallel_groups.PATCHES, *layer_layout.PATCHES, *tied_embeddings.PATCHES)
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_FOR_ONE_CHUNK = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


@patching()
def place_in_v() -> Callable[[], None]:
    """Put the two chunks of each rank into a V, in all models that this process builds from now on.

    Call it on all ranks before ``initialize_model_parallel``. The TransformerConfig then needs a
    ``pipeline_model_parallel_layout`` with two stages for each rank, as text, in the order of the stages. Returns a
    function that reverts it.

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
    new = [patch for patch in _PATCHES if not patch.applied]
    for patch in _PATCHES:
        patch.check()
    first_stage.apply(
        of_group=lambda run, group: group.rank() == group.size() - 1,
        of_rank=_has_first_stage,
    )
    parallel_groups.apply(lambda ranks: [ranks[-1]])
    layer_layout.apply(_layout)
    tied = _TiedWeights()
    tied_embeddings.apply(tied.start, tied.add_gradients)
    patch_schedules()  # they stay: a loop may hold a wrapped function
    return patching()(lambda: revert_all(new))


def place_arguments(args: Any) -> None:
    """Put a Megatron-LM script's chunks into a V if its arguments say so, before Megatron validates them.

    Raises ConfigError or UnsupportedError, one line, if they cannot be.
    """
    if getattr(args, f"{SECTION}_placement", "host") != "v":
        return
    size = args.pipeline_model_parallel_size
    if size < 2:
        raise ConfigError(f'--pipeline-model-parallel-size is {size}: allowed with placement "v" is at least 2')
    for name in (*_VIRTUAL, *_FOR_ONE_CHUNK):
        if getattr(args, name, None):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f'{option} is {getattr(args, name)}: with placement "v", leave it out')
    if getattr(args, "mtp_num_layers", None):
        raise ConfigError(f'--mtp-num-layers is {args.mtp_num_layers}: with placement "v", leave it out')
    place_in_v()
    microbatch_data.apply(lambda: parallel_state.is_pipeline_last_stage(ignore_virtual=True))
    if args.pipeline_model_parallel_layout is None:
        args.pipeline_model_parallel_layout = _layout_for(args)
    _layout(args.pipeline_model_parallel_layout, size)  # refuses a wrong number of stages


def _layout_for(args: Any) -> str:
    """Return a layout in which the last stage has fewer layers, as many as its output layer costs."""
    hidden, vocabulary = args.hidden_size, getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    layout = even_layout(args.num_layers, args.pipeline_model_parallel_size, vocabulary / (12.0 * hidden))
    announce(
        args.rank,
        f"placement: two chunks on each rank, in a V, with the layers {layout}; the last stage has fewer layers, "
        "because its output layer takes time too (another choice: --pipeline-model-parallel-layout)",
    )
    return layout


@functools.lru_cache
def _layout(layout: str, size: int) -> VLayout:
    return VLayout(layout, size)


def _has_first_stage(run: Callable[[], bool], ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Answer ``is_pipeline_first_stage`` as Megatron does, but for the last rank."""
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
        if module.pre_process:
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
        of_first, of_last = (getattr(weight, name) for weight in weights)
        if of_first is not None and of_last is not None:
            of_first.add_(of_last)
            of_last.copy_(of_first)


def _tied_weight(chunk: Any) -> torch.nn.Parameter | None:
    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if not getattr(module, "share_embeddings_and_output_weights", False):
        return None
    return module.shared_embedding_or_output_weight() if module.pre_process or module.post_process else None
