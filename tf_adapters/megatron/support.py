"""Refuse Megatron-Core features with which freezing would be wrong, before training starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.layers import layers_of
from tf_adapters.hosts.support import Problem, compiled_problem, first_problem, foreign_module, missing_name, refuse
from tf_adapters.megatron.chunks import innermost
from tf_adapters.megatron.optimizers import inner_of, leaves

_REMATERIALIZED = "the weight gradient of one layer finishes that of another, which a frozen weight would leave undone"
_DELAYED = (
    "weight gradients are computed apart from the backward that is masked; set it to False, and weight_gradients to "
    '"deferred" here'
)
_UNEVEN = "it makes microbatches of different lengths, but a plan assumes equal times for all microbatches of a stage"
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("cuda_graph_impl", lambda v: v != "none", "a CUDA graph would replay one mask for ever"),
    ("enable_cuda_graph", bool, "a CUDA graph would replay one mask for ever"),
    ("external_cuda_graph", bool, "a CUDA graph would replay one mask for ever"),
    ("delay_wgrad_compute", bool, _DELAYED),  # before the next one, without which Megatron refuses it
    ("overlap_moe_expert_parallel_comm", bool, "the combined 1F1B schedule mixes two microbatches in one pass"),
    ("hybrid_context_parallel", bool, "its schedule runs its own forwards and backwards"),
    ("defer_embedding_wgrad_compute", bool, "weight gradients are computed apart from the backward that is masked"),
    ("overlap_dispatch_backward_with_experts_wgrad", bool, "weight gradients are computed apart from the backward"),
    ("moe_paged_stash", bool, "it counts activations that a frozen layer does not store"),
    ("fine_grained_activation_offloading", bool, "it counts activations that a frozen layer does not store"),
    ("mtp_standalone", bool, "multi-token prediction was checked on the last stage only"),
    ("mtp_use_repeated_layer", bool, "multi-token prediction was checked with a layer for each depth only"),
    ("mtp_detach_heads", bool, "multi-token prediction was checked with a loss that trains all of the model only"),
    ("mtp_hsm", bool, "multi-token prediction was checked with a layer for each depth only"),
    ("gtp_weight_remat_size", lambda v: v > 1, _REMATERIALIZED),
    ("expert_gtp_weight_remat_size", lambda v: v > 1, _REMATERIALIZED),
    ("sequence_packing_scheduler", bool, _UNEVEN),
    ("dynamic_context_parallel", bool, _UNEVEN),
)
_ALSO_READ = (
    *("recompute_granularity", "mtp_num_layers", "tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_overlap_rs_dgrad"),
    *("tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "overlap_p2p_comm_warmup_flush"),
)
"""Further options whose values decide what is refused or how a batch runs."""

_NOT_SINCE_0_16 = {
    **dict.fromkeys(("overlap_dispatch_backward_with_experts_wgrad", "moe_paged_stash"), (0, 18)),
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), (0, 19)),
    **dict.fromkeys(("sequence_packing_scheduler", "dynamic_context_parallel", "mtp_detach_heads", "mtp_hsm"), None),
    "mtp_use_repeated_layer": None,
}
"""The first version of an option, for those that 0.16 does not have; None if it is not in every later version."""

_APART_TWICE = (
    "mtp_num_layers is set, and weight gradients apart from their backward (deferred, or of sampled tokens) were not "
    "checked where the output layer computes several times in a microbatch"
)
_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
DDP_NAMES = (
    *("ddp_config", "force_all_reduce", "overlap_param_gather_with_optimizer_step", "param_to_bucket_group"),
    *("remove_forward_pre_hook_handles", "use_forward_hook"),
)
DDP_CONFIG_NAMES = ("align_param_gather", "overlap_grad_reduce")
BUCKET_GROUP_NAMES = ("finish_param_sync", "is_last_microbatch", "register_grad_ready")
DISTRIBUTED_OPTIMIZER_NAMES = ("_get_model_param_range_map", "model_param_group_index_map")


def check(chunks: Sequence[Any], optimizer: Any, settings: TimelyFreezeConfig | None = None) -> None:
    """Raise UnsupportedError, one line, if freezing these model chunks could be wrong."""
    if not chunks:
        refuse("there is no model chunk; it needs the list of modules that the schedule gets")
    for chunk in chunks:
        refuse(_chunk_problem(chunk) or missing_ddp_name(chunk))
        model = innermost(chunk)
        refuse(compiled_problem(chunk, model, layers_of(model), settings))
    config = get_model_config(chunks[0])
    refuse(config_problem(config))
    if settings is not None and settings.splits_backwards:
        refuse(_APART_TWICE if getattr(config, "mtp_num_layers", None) else None)
        refuse(_replaced_backward_problem(settings.without_split))
    if optimizer is None:
        refuse("the optimizer is None; pass the one that get_megatron_optimizer returned, or a torch optimizer")
    for leaf in leaves(optimizer):
        refuse(_optimizer_problem(leaf) or missing_optimizer_name(leaf))


def missing_options(config: Any) -> list[str]:
    """Return the options that ``check`` reads and that this version of Megatron should have but does not.

    An option that a new version has renamed would count as off, although it may be on. ``config`` is a
    TransformerConfig.
    """
    version = tuple(map(int, re.findall(r"\d+", metadata.version("megatron-core"))[:2]))
    missing = []
    for name in (*(name for name, _, _ in _REFUSED), *_ALSO_READ):
        since = _NOT_SINCE_0_16.get(name, (0, 16))
        if since is not None and since <= version and not hasattr(config, name):
            missing.append(name)
    return missing


def keeps_order(config: Any, pipeline_size: int, chunks: Sequence[Any]) -> bool:
    """Return whether a plan must keep the host's order of forwards.

    It must with variable lengths and with pipelines of several modules, because each tensor then takes two transfers,
    and the first one blocks. With more than two chunks, all ranks may gather a chunk's parameters at the same time
    (``align_param_gather``), in the host's order.
    """
    return (
        pipeline_size == 1
        or (len(chunks) > 2 and any(map(_gathers_aligned, chunks)))
        or config.variable_seq_lengths
        or bool(getattr(config, "mtp_standalone", False))
        or not hasattr(P2PCommunicator, "_communicate")
    )


def _gathers_aligned(chunk: Any) -> bool:
    settings = getattr(chunk, "ddp_config", None)
    return bool(getattr(settings, "overlap_param_gather", False) and getattr(settings, "align_param_gather", False))


def _replaced_backward_problem(advice: str) -> Problem:
    """Return a problem if another project has replaced or wrapped the function that runs a microbatch's backward."""
    module = foreign_module(schedules.backward_step, ("megatron", "megatron_patches"))
    return module and (
        f"Megatron's backward_step was replaced by {module}, which may use each microbatch's whole gradient; "
        f"use {advice}"
    )


def config_problem(config: Any) -> Problem:
    """Return what in a TransformerConfig makes freezing, or another order of a batch, wrong."""
    for field, wrong, why in _REFUSED:
        value = getattr(config, field, None)  # a missing field is off, and ``missing_options`` names it
        if value is not None and wrong(value):
            return f"{field} is {value!r}, and {why}"
    if _reduces_with_weight_gradients(config):
        return (
            "tp_comm_overlap with tp_comm_bulk_wgrad reduces input gradients while weight gradients are computed, and "
            "those of frozen weights are not; set tp_comm_bulk_wgrad to False"
        )
    if getattr(config, "recompute_granularity", None) is not None:
        return missing_name(TransformerBlock, ("_checkpointed_forward",), called="TransformerBlock")
    return None


def _reduces_with_weight_gradients(config: Any) -> bool:
    """Return whether Transformer Engine reduce-scatters a layer's input gradient inside its weight gradient's product.

    ``tp_comm_overlap_rs_dgrad`` does it in the input gradient's product instead, except in layers that disable it.
    Source: transformer_engine/pytorch/module/linear.py; megatron/core/extensions/transformer_engine.py.
    """
    if not (getattr(config, "tp_comm_overlap", False) and getattr(config, "tp_comm_bulk_wgrad", True)):
        return False
    exceptions = ("tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1")
    alone = getattr(config, "tp_comm_overlap_rs_dgrad", False)
    return not alone or any(getattr(config, field, False) for field in exceptions)


def _chunk_problem(chunk: Any) -> Problem:
    wrapper = type(chunk).__name__
    if not isinstance(chunk, torch.nn.Module):
        return f"a model chunk is a {wrapper}; it needs the list of modules that the schedule gets"
    if "FullyShardedDataParallel" in wrapper:
        return f"the model is wrapped in {wrapper}; use Megatron's DistributedDataParallel"
    return None


def missing_ddp_name(chunk: Any) -> Problem:
    """Return a problem if the chunk's DistributedDataParallel lacks a name that we use."""
    if not isinstance(chunk, DistributedDataParallel):
        return None
    problem = missing_name(chunk, DDP_NAMES) or missing_name(chunk.ddp_config, DDP_CONFIG_NAMES)
    groups = () if problem else tuple(chunk.param_to_bucket_group.values())
    return problem or (missing_name(groups[0], BUCKET_GROUP_NAMES) if groups else None)


def _optimizer_problem(leaf: Any) -> Problem:
    inner = inner_of(leaf)
    outer_name, name = type(leaf).__name__, type(inner).__name__
    unknown = not isinstance(leaf, (*_OPTIMIZERS, torch.optim.Optimizer))
    graphed = getattr(getattr(leaf, "config", None), "optimizer_cuda_graph", False)  # from 0.19 on
    offloads, is_muon = name == "HybridDeviceOptimizer", "muon" in name.lower()
    foreign = not isinstance(inner, torch.optim.Optimizer)
    return first_problem(
        {
            f"the optimizer {outer_name} is not supported; use Megatron's FP32, float16 or distributed one": unknown,
            "optimizer_cuda_graph is True, and a CUDA graph would update frozen parameters too": graphed,
            "the optimizer's offload to the CPU (optimizer_cpu_offload) is not supported": offloads,
            f"the optimizer {name} mixes all rows of an update, frozen ones too; use Adam or SGD": is_muon,
            f"the optimizer {name} is no torch.optim.Optimizer": foreign,
        }
    )


def missing_optimizer_name(leaf: Any) -> Problem:
    """Return a problem if one of Megatron's optimizers lacks a name that finds the tensors it updates."""
    if isinstance(leaf, DistributedOptimizer):
        return missing_name(leaf, DISTRIBUTED_OPTIMIZER_NAMES)
    if not isinstance(leaf, Float16OptimizerWithFloat16Params):
        return None
    problem = missing_name(leaf, ("float16_groups",))
    parameters = () if problem else [p for group in leaf.float16_groups for p in group]
    return problem or next((m for p in parameters if (m := missing_name(p, ("main_param",)))), None)
