"""Refuse DeepSpeed features with which freezing would be wrong, before training starts."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.deepspeed.json_config import APEX, FP16, FP16_AUTOCAST, OFFLOAD, clipping_warning, untested_problem
from tf_adapters.deepspeed.partitions import misplaced
from tf_adapters.deepspeed.replaced import replaced_problem
from tf_adapters.deepspeed.stages import is_dualpipev, layers_by_stage
from tf_adapters.hosts.agreement import refuse_other_schedules, refuse_v
from tf_adapters.hosts.support import Problem, compiled_problem, first_problem, missing_name, refuse
from tf_adapters.weight_gradients.parameters import COMPILED

ENGINE_NAMES = (
    *("_INSTRUCTION_MAP", "_config", "_exec_schedule", "pipe_buffers", "save_checkpoint", "load_checkpoint"),
    *("dynamic_shape", "reset_activation_shape", "pipe_recv_buf", "grad_layer", "has_moe_layers"),
)
TRANSFER_NAMES = ("send", "recv", "_grid", "_is_valid_send_recv")
MODULE_NAMES = ("get_tied_weights_and_groups", "_layer_specs", "_local_start", "_local_stop")
ZERO_NAMES = (
    *("single_partition_of_fp32_groups", "bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups"),
    *("grad_partition_insertion_offset", "grad_start_offset", "get_param_id", "use_grad_accum_attribute"),
    *("real_dp_process_group", "cpu_offload"),
)
BF16_NAMES = (
    *("fp32_groups_flat_partition", "fp32_groups_gradients", "fp32_groups_has_gradients", "bf16_groups"),
    *("bf16_groups_flat", "bf16_partitioned_groups", "fp32_groups_gradients_flat"),
    *("fp32_groups_gradient_flat_partition", "real_dp_process_group"),
)
_FIRST_RIGHT_VERSION = (0, 19, 3)
_SCALED = ("8bit", "4bit", "fp8")
V_NAMES = ("_exec_recv_activations", "_exec_recv_grads", "_queue_p2p", "num_stages", "stage_id", "grid")


def check(engine: Any, settings: TimelyFreezeConfig) -> None:
    """Raise UnsupportedError, one line, if freezing this engine's parameters could be wrong.

    Raises ConfigError if the settings choose a schedule for DualPipeV's engine.
    """
    if not isinstance(engine, PipelineEngine):
        refuse(
            f"the engine is a {type(engine).__name__}; it needs a PipelineEngine, "
            "which deepspeed.initialize returns for a PipelineModule"
        )
    refuse(missing_name(engine, ENGINE_NAMES, called="PipelineEngine"))
    refuse(missing_name(p2p, TRANSFER_NAMES, called="deepspeed.runtime.pipe.p2p"))
    module_names = (*MODULE_NAMES, "phase_bounds") if is_dualpipev(engine) else MODULE_NAMES
    refuse(missing_name(engine.module, module_names, called="PipelineModule"))
    refuse_compiled(engine, settings)
    layers = {name: layer for of_stage in layers_by_stage(engine).values() for name, layer in of_stage.items()}
    refuse(compiled_problem(engine.module, engine.module, layers, settings, has_taps=True))
    refuse(replaced_problem(engine, settings))
    refuse(_setting_problem(engine) or _optimizer_problem(engine) or _partition_problem(engine))
    if is_dualpipev(engine):
        if settings.splits_backwards and settings.placement != "v":
            refuse(f'DualPipeV keeps weight gradients in its backwards; use placement "v" or {settings.without_split}')
        refuse_other_schedules(settings, "DeepSpeed's DualPipeV engine runs its own")
        refuse(missing_name(engine, V_NAMES, called="DualPipeVEngine") if settings.placement == "v" else None)
    else:
        refuse_v(settings, "build a deepspeed.pipe.DualPipeVModule instead of the PipelineModule")


def refuse_compiled(engine: Any, settings: TimelyFreezeConfig) -> None:
    """Raise UnsupportedError if the engine itself has been compiled: a cheap check for every step.

    With nothing masked, its layers can be compiled one by one, as ``engine.compile()`` does. Its backward cannot.
    """
    if not getattr(engine, "is_compiled", False):
        return
    refuse(COMPILED if settings.masks_parameters else None)
    if getattr(engine, "_is_compiled_autograd_enabled", False):
        refuse("engine.compile was called with compiled_autograd_enabled=True, which compiles the whole backward")
    refuse("DeepCompile reduces gradients inside compiled graphs; leave it off" if _is_deepcompiled(engine) else None)


def _is_deepcompiled(engine: Any) -> bool:
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    return enabled is not None and bool(enabled())


def refuse_another(schedule: Any, attached: type) -> None:
    """Raise UnsupportedError if the engine runs another kind of schedule than at attach."""
    kind = type(schedule)
    text = (
        f"the engine runs a {kind.__name__} of {kind.__module__}, not the {attached.__name__} that it chooses by itself"
    )
    refuse(None if kind is attached else f"{text}; train such batches without timely_freeze")


def warnings(engine: Any) -> list[str]:
    """Return warnings about faults of the host itself, one line each."""
    lines = []
    version = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    if version < _FIRST_RIGHT_VERSION:
        lines.append(
            f"DeepSpeed {deepspeed.__version__} divides the last pipeline stage's gradients by the number of "
            "microbatches twice, with or without freezing; use 0.19.3 or newer"
        )
    if engine.optimizer is engine.basic_optimizer and engine.gradient_clipping() > 0 and engine.num_stages > 1:
        lines.append(clipping_warning(engine.gradient_clipping()))
    return lines


def _setting_problem(engine: Any) -> Problem:
    alone = is_dualpipev(engine) and engine.num_stages == 1
    uses_apex = getattr(engine, "amp_enabled", lambda: False)()  # DeepSpeed before 0.19.8
    size = engine.grid.model_parallel_size
    autocasts = getattr(engine, "torch_autocast_enabled", lambda: False)()  # each rank has its own GradScaler
    return first_problem(
        {
            "DualPipeV on one pipeline rank is not supported; use two or more, or the default pipeline engine": alone,
            f"model parallelism of size {size} inside pipeline stages is not supported": size > 1,
            "mixture-of-experts layers are not supported with DeepSpeed's pipeline": engine.has_moe_layers,
            FP16: engine.fp16_enabled(),
            FP16_AUTOCAST: autocasts and engine.torch_autocast_dtype() == torch.float16,
            APEX: uses_apex,
        }
    )


def _optimizer_problem(engine: Any) -> Problem:
    outer, inner = engine.optimizer, engine.basic_optimizer
    wrapper, name = type(outer).__name__, type(inner).__name__
    if inner is None:
        return 'the engine has no optimizer; name one in the config ("optimizer") or pass one to deepspeed.initialize'
    foreign = not isinstance(inner, torch.optim.Optimizer)
    unknown = outer is not inner and not isinstance(outer, (DeepSpeedZeroOptimizer, BF16_Optimizer))
    offloads = getattr(outer, "cpu_offload", False)
    problem = f"the optimizer {name} is no torch.optim.Optimizer" if foreign else untested_problem(name)
    problem = problem or first_problem(
        {
            f"the optimizer wrapper {wrapper} is not supported; use ZeRO stage 0 or 1, fp32 or bf16": unknown,
            OFFLOAD: offloads,
        }
    )
    return problem or (None if outer is inner else _scaled_problem(inner) or missing_partition_name(outer))


def _scaled_problem(inner: torch.optim.Optimizer) -> Problem:
    """Return a problem if the moments have one scale for a block: frozen and updated elements would share it."""
    name = type(inner).__name__
    dtypes = [getattr(inner, f"{moment}_dtype", None) for moment in ("exp_avg", "exp_avg_sq")]  # of FusedAdam
    scaled = (
        any(part in name.lower() for part in _SCALED)
        or getattr(getattr(inner, "args", None), "optim_bits", 32) < 32  # of bitsandbytes
        or any(dtype in (torch.float16, torch.uint8) for dtype in dtypes)
    )
    text = f"the optimizer {name} scales its moments by blocks, and a block of a flat partition is frozen in part only"
    return f"{text}; use fp32 or bf16 moments, or ZeRO stage 0 in fp32" if scaled else None


def missing_partition_name(outer: Any) -> Problem:
    """Return a problem if a flat-partition optimizer lacks a name that holding parameters needs."""
    return missing_name(outer, BF16_NAMES if isinstance(outer, BF16_Optimizer) else ZERO_NAMES)


def _partition_problem(engine: Any) -> Problem:
    """Return a problem if the place of a parameter in the flat partition is ambiguous."""
    if engine.optimizer is engine.basic_optimizer:
        return None
    name = misplaced(engine.optimizer, dict(engine.module.named_parameters()))
    text = f"{type(engine.optimizer).__name__} keeps the gradient of {name} at another place than its values"
    return None if name is None else f"{text}; use ZeRO stage 0 in fp32"
