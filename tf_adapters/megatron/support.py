"""What freezing can be right under in Megatron-Core, checked before any training starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.utils import get_model_config

from tf_adapters.errors import UnsupportedError
from tf_adapters.masking.compiled import COMPILED, is_compiled
from tf_adapters.megatron.optimizers import inner_of, leaves

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("cuda_graph_impl", lambda v: v not in (None, "none"), "a CUDA graph would replay one mask for ever"),
    ("enable_cuda_graph", bool, "a CUDA graph would replay one mask for ever"),
    ("external_cuda_graph", bool, "a CUDA graph would replay one mask for ever"),
    ("overlap_moe_expert_parallel_comm", bool, "the combined 1F1B schedule mixes two microbatches in one pass"),
    ("hybrid_context_parallel", bool, "its schedule runs forwards and backwards of its own"),
    ("delay_wgrad_compute", bool, "weight gradients are computed apart from the backward that is masked"),
    ("defer_embedding_wgrad_compute", bool, "weight gradients are computed apart from the backward that is masked"),
    ("overlap_dispatch_backward_with_experts_wgrad", bool, "weight gradients are computed apart from the backward"),
    ("moe_paged_stash", bool, "it keeps count of activations that freezing does not keep"),
    ("fine_grained_activation_offloading", bool, "it keeps count of activations that freezing does not keep"),
    ("mtp_num_layers", bool, "multi-token prediction uses the embedding on two stages in one microbatch"),
)
_DISTRIBUTED = ("_get_model_param_range_map",)
_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def check(chunks: Sequence[Any], optimizer: Any, config: Any = None) -> None:
    """Raise UnsupportedError, one line, if freezing these model chunks could be wrong.

    ``config`` is the model's TransformerConfig; by default the first chunk's own.
    """
    problem = _model_problem(chunks)
    if problem is None:
        problem = _config_problem(config or get_model_config(chunks[0])) or _optimizer_problem(optimizer)
    if problem:
        raise UnsupportedError(f"timely_freeze cannot run here: {problem}")


def _config_problem(config: Any) -> str | None:
    for field, wrong, why in _REFUSED:
        value = getattr(config, field, None)  # a field that this version does not have asks for nothing
        if wrong(value):
            return f"{field} is {value!r}, and {why}"
    return None


def _model_problem(chunks: Sequence[Any]) -> str | None:
    if not chunks:
        return "there is no model chunk; it needs the list of modules that the schedule gets"
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            return f"a model chunk is a {type(chunk).__name__}; it needs the list of modules that the schedule gets"
        wrapper = type(chunk).__name__
        if "FullyShardedDataParallel" in wrapper:
            return f"the model is wrapped in {wrapper}; use Megatron's DistributedDataParallel"
        if any(map(is_compiled, chunk.modules())):
            return COMPILED
    return None


def _optimizer_problem(optimizer: Any) -> str | None:
    if optimizer is None:
        return "the optimizer is None; pass the one that get_megatron_optimizer returned, or a torch optimizer"
    for leaf in leaves(optimizer):
        inner = inner_of(leaf)
        if not isinstance(leaf, (*_OPTIMIZERS, torch.optim.Optimizer)):
            return (
                f"the optimizer {type(leaf).__name__} is not supported; use Megatron's FP32, float16 or distributed one"
            )
        if getattr(getattr(leaf, "config", None), "optimizer_cuda_graph", False):  # from 0.19 on
            return "optimizer_cuda_graph is True, and a CUDA graph would update frozen parameters too"
        if type(inner).__name__ == "HybridDeviceOptimizer":
            return "the optimizer's offload to the CPU (optimizer_cpu_offload) is not supported"
        missing = [name for name in _DISTRIBUTED if isinstance(leaf, DistributedOptimizer) and not hasattr(leaf, name)]
        if missing:
            return f"this Megatron's DistributedOptimizer has no {missing[0]}; see docs/megatron.md"
        if "muon" in type(inner).__name__.lower():
            return f"the optimizer {type(inner).__name__} mixes all rows of an update, frozen ones too; use Adam or SGD"
        if not isinstance(inner, torch.optim.Optimizer):
            return f"the optimizer {type(inner).__name__} is no torch.optim.Optimizer"
    return None
