"""What freezing can be right under in DeepSpeed, checked by symbol before any training starts."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tf_adapters.deepspeed.stages import is_dualpipev
from tf_adapters.errors import UnsupportedError
from tf_adapters.masking.compiled import COMPILED, is_compiled

_MODULE_SYMBOLS = ("_layer_specs", "_local_start", "_local_stop")
_ENGINE_SYMBOLS = (
    "_INSTRUCTION_MAP",
    "_config",
    "_exec_schedule",
    "pipe_buffers",
    "save_checkpoint",
    "load_checkpoint",
)
_FIRST_RIGHT_VERSION = (0, 19, 3)
_UNTESTED_OPTIMIZERS = ("onebit", "zerooneadam", "muon")


def check(engine: Any) -> None:
    """Raise UnsupportedError, one line, if freezing this engine's parameters could be wrong."""
    for problem in (_engine_problem(engine), _model_problem(engine), _optimizer_problem(engine)):
        if problem:
            raise UnsupportedError(f"timely_freeze cannot run here: {problem}")


def refuse_compiled(engine: Any) -> None:
    """Raise UnsupportedError if the engine itself has been compiled: a cheap check for every step."""
    if getattr(engine, "is_compiled", False):
        raise UnsupportedError(f"timely_freeze cannot run here: {COMPILED}")


def warnings(engine: Any) -> list[str]:
    """What a user should know of the host itself before trusting a run, one line each."""
    found = []
    version = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    if version < _FIRST_RIGHT_VERSION:
        found.append(
            f"DeepSpeed {deepspeed.__version__} divides the last pipeline stage's gradients by the number of "
            "microbatches twice, with or without freezing; use 0.19.3 or newer"
        )
    if engine.optimizer is engine.basic_optimizer and engine.gradient_clipping() > 0 and engine.num_stages > 1:
        found.append(
            f"gradient_clipping is {engine.gradient_clipping():g} with ZeRO stage 0 in fp32: DeepSpeed's pipeline "
            "engine then clips by the first stage's norm alone, with or without freezing; use ZeRO stage 1"
        )
    return found


def _engine_problem(engine: Any) -> str | None:
    if not isinstance(engine, PipelineEngine):
        return (
            f"the engine is a {type(engine).__name__}; it needs a PipelineEngine, "
            "which deepspeed.initialize returns for a PipelineModule"
        )
    missing = [symbol for symbol in _ENGINE_SYMBOLS if not hasattr(engine, symbol)]
    if missing:
        return f"this DeepSpeed has no PipelineEngine.{missing[0]}; run `tf-adapters doctor` for the versions that work"
    missing = [symbol for symbol in _MODULE_SYMBOLS if not hasattr(engine.module, symbol)]
    if missing:
        return f"this DeepSpeed has no PipelineModule.{missing[0]}; run `tf-adapters doctor` for the versions that work"
    if is_dualpipev(engine) and engine.num_stages == 1:
        return "DualPipeV on one pipeline rank is not supported; use two or more, or the default pipeline engine"
    if engine.grid.model_parallel_size > 1:
        return f"model parallelism of size {engine.grid.model_parallel_size} inside pipeline stages is not supported"
    return None


def _model_problem(engine: Any) -> str | None:
    if getattr(engine, "is_compiled", False) or any(map(is_compiled, engine.module.modules())):
        return COMPILED
    if getattr(engine, "has_moe_layers", False):
        return "mixture-of-experts layers are not supported with DeepSpeed's pipeline"
    return None


def _optimizer_problem(engine: Any) -> str | None:
    if engine.fp16_enabled():
        return "fp16 is not supported; use bf16 or fp32"
    if hasattr(engine, "amp_enabled") and engine.amp_enabled():  # DeepSpeed before 0.19.8
        return 'mixed precision by NVIDIA Apex ("amp") is not supported; use bf16 or fp32'
    outer, inner = engine.optimizer, engine.basic_optimizer
    if inner is None:
        return 'the engine has no optimizer; name one in the config ("optimizer") or pass one to deepspeed.initialize'
    if not isinstance(inner, torch.optim.Optimizer):
        return f"the optimizer {type(inner).__name__} is no torch.optim.Optimizer"
    if any(name in type(inner).__name__.lower() for name in _UNTESTED_OPTIMIZERS):
        return f"the optimizer {type(inner).__name__} is not supported; use Adam, AdamW, SGD or another plain one"
    if outer is not inner and not isinstance(outer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return f"the optimizer wrapper {type(outer).__name__} is not supported; use ZeRO stage 0 or 1, fp32 or bf16"
    missing = _missing_private_name(engine, outer, inner)
    if missing:
        return (
            f"this DeepSpeed has no {missing}, without which frozen parameters would be updated; see docs/deepspeed.md"
        )
    if getattr(outer, "cpu_offload", False):
        return "ZeRO's optimizer offload is not supported; remove zero_optimization.offload_optimizer"
    return None


def _missing_private_name(engine: Any, outer: Any, inner: Any) -> str | None:
    """The first private name of a flat-partition optimizer that we need and this version does not have."""
    if outer is inner:
        return None
    names: tuple[str, ...] = ("single_partition_of_fp32_groups",)
    if isinstance(outer, BF16_Optimizer):
        names = ("fp32_groups_flat_partition", "fp32_groups_gradients", "fp32_groups_has_gradients", "bf16_groups")
    for name in names:
        if not hasattr(outer, name):
            return f"{type(outer).__name__}.{name}"
    trained = [p for group in _half_groups(outer) for p in group]
    if any(not hasattr(parameter, "_hp_mapping") for parameter in trained):
        return "Parameter._hp_mapping"
    fragments = [m for p in trained if (m := p._hp_mapping) is not None]
    for name in ("hp_fragment_address", "lp_fragment_address", "param_group_index"):
        if fragments and not hasattr(fragments[0], name):
            return f"Parameter._hp_mapping.{name}"
    return None


def _half_groups(outer: Any) -> Any:
    """The parameter groups that a flat-partition optimizer trains."""
    return outer.bf16_groups if isinstance(outer, BF16_Optimizer) else outer.bit16_groups
