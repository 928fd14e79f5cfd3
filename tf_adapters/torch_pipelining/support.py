"""Refuse features of torch.distributed.pipelining with which freezing would be wrong, before training starts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import _composable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import schedules as host
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.layers import layers_of
from tf_adapters.hosts.support import (
    Problem,
    compiled_problem,
    first_problem,
    foreign_module,
    missing_name,
    module_of,
    refuse,
)
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.torch_pipelining.replicas import adds_up_in_another_type, inside_replica, reshards_after_forward
from tf_adapters.torch_pipelining.schedules import stages_of, translate

SCHEDULE_CLASSES = ("_PipelineSchedule", "_PipelineScheduleRuntime", "PipelineScheduleSingle", "Schedule1F1B")
STAGE_NAMES = (
    *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "device"),
    *("dw_builder", "get_bwd_send_ops", "get_fwd_send_ops", "group", "is_first", "submod"),
)
BACKWARD_NAMES = ("backward_one_chunk", "backward_weight_one_chunk", "backward_maybe_with_nosync")
REDUCER_NAMES = ("_delay_all_reduce_params", "_use_python_reducer", "mixed_precision", "no_sync", "reducer")
FSDP_NAMES = ("_get_fsdp_state",)
FSDP_STATE_NAMES = ("_auto_reshard_after_forward", "_fsdp_param_groups")
_COMPUTATIONS = {*(kind.value for kind in Kind), "OVERLAP_F_B"}


def check(schedule: Any, optimizers: Sequence[Any], settings: TimelyFreezeConfig | None = None) -> None:
    """Raise UnsupportedError, one line, if freezing with this schedule could be wrong."""
    refuse_grad_scaler()
    refuse(_schedule_problem(schedule))
    refuse(_replaced_problem(schedule) if settings is not None and settings.defers else None)
    translated = translate(schedule)
    for stage in stages_of(schedule):
        refuse(_stage_problem(stage, translated, bool(optimizers)))
        model = inside_replica(stage.submod)
        refuse(compiled_problem(stage.submod, model, layers_of(model), settings, has_taps=True))
    refuse(_optimizer_problem(schedule, optimizers))


def check_split_backwards(schedule: Any, advice: str) -> None:
    """Raise UnsupportedError, with ``advice``, if weight gradients apart from the host's backwards would be wrong.

    If the schedule itself splits backwards (I and W), torch adds up gradients in their own type until FSDP's next
    backward. The sums then depend on the order of I and W.
    """
    splits = any(action.kind is Kind.WEIGHT_GRAD for action in translate(schedule).actions)
    for stage in stages_of(schedule):
        problem = _own_reduction(stage.submod) if isinstance(stage.submod, DistributedDataParallel) else None
        if problem:
            refuse(f"stage {stage.stage_index} is wrapped in DistributedDataParallel {problem}; use {advice} with it")
        if splits and adds_up_in_another_type(stage.submod):
            refuse(
                f"stage {stage.stage_index} has fully_shard with another reduce_dtype than the gradients' type, and "
                f"in a schedule with split backwards (I and W) their sums depend on its order; use {advice} with it"
            )


def refuse_grad_scaler() -> None:
    """Raise UnsupportedError if a GradScaler is in use: it skips an update only on a rank with an infinite gradient.

    The ranks' step counts would then differ, and ranks would wait for each other for ever.
    """
    if any(scaler.is_enabled() for scaler in _grad_scalers()):
        refuse(
            "a torch.amp.GradScaler is enabled, which skips updates on single ranks of a pipeline; "
            "use bfloat16 autocast, or GradScaler(enabled=False)"
        )


def replaced_backward(stage: Any) -> str | None:
    """Return why a stage's weight gradients must stay in its backward: the backward is not torch's; None if it is.

    Such a backward may use each microbatch's whole gradient. For example, it clips the gradient, or reduces it.
    """
    for name in BACKWARD_NAMES:
        method = getattr(stage, name, None)
        module = foreign_module(method, ("torch",))
        if method is not None and module is not None:
            owner = next(cls for cls in (stage, *type(stage).__mro__) if name in vars(cls))
            called = type(stage).__name__ if owner is stage else owner.__name__
            return f"{called}.{name} of {module} is not torch's own, and it may use each microbatch's whole gradient"
    return None


def _grad_scalers() -> list[torch.amp.GradScaler]:
    """Return every GradScaler of this process. An instance refers to its class; asking each object is slow."""
    classes: list[type] = [torch.amp.GradScaler]
    for known in classes:
        classes.extend(known.__subclasses__())
    return [thing for thing in gc.get_referrers(*classes) if type(thing) in classes]


def _schedule_problem(schedule: Any) -> Problem:
    problem = missing_name(host, SCHEDULE_CLASSES, called="torch.distributed.pipelining.schedules")
    problem = problem or missing_name(_composable, ("_get_registry",), called="torch.distributed._composable")
    if problem:
        return problem
    if not isinstance(schedule, host._PipelineSchedule):
        return f"the schedule is a {type(schedule).__name__}; it needs one of torch.distributed.pipelining"
    names = ("_stage", "_num_stages") if isinstance(schedule, host.PipelineScheduleSingle) else ("_stages",)
    if isinstance(schedule, host._PipelineScheduleRuntime):
        names = (*names, "_comp_type_to_function_map")
    problem = missing_name(schedule, ("_has_backward", "_loss_fn", "_n_microbatches", *names))
    if problem:
        return problem
    if not schedule._has_backward:
        return "the schedule has no loss_fn, so it runs forwards only"
    if isinstance(schedule, host._PipelineScheduleRuntime):
        replaced = [kind for kind in schedule._comp_type_to_function_map if kind.value in _COMPUTATIONS]
        if replaced:
            return f"a custom function is registered for {replaced[0].name}; masks need the stages' own computations"
    return None


def _replaced_problem(schedule: Any) -> Problem:
    """Return a problem if another project has replaced the schedule's loop, which a rewritten order would bypass."""
    module = module_of(schedule._step_microbatches)
    if module.split(".")[0] == "torch":
        return None
    return (
        f"the schedule runs its batches in a loop of {module}, which a rewritten order would bypass; "
        'use weight_gradients "in_place"'
    )


def _stage_problem(stage: Any, schedule: PipelineSchedule, has_optimizer: bool) -> Problem:
    problem = missing_name(stage, STAGE_NAMES)
    if problem:
        return problem
    if stage.dw_builder is not None:
        return f"stage {stage.stage_index} has a dw_builder, which computes weight gradients outside of autograd"
    splits = any(a.stage == stage.stage_index and a.kind is Kind.WEIGHT_GRAD for a in schedule.actions)
    if splits and stage.is_first and not any(p.requires_grad for p in stage.submod.parameters()):
        return (
            f"stage {stage.stage_index} trains nothing, and in split backwards (I and W) torch then computes no "
            "gradients for the next stage, with or without freezing; use a schedule of whole backwards, such as 1F1B"
        )
    replica = _replica_problem(stage.submod, splits, has_optimizer)
    return f"stage {stage.stage_index} {replica}" if replica else None


def _replica_problem(module: Any, splits: bool, has_optimizer: bool) -> Problem:
    parts = list(module.modules())
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        return "is wrapped in FullyShardedDataParallel, whose flat parameters cannot be masked; use fully_shard"
    if any(isinstance(part, DistributedDataParallel) for part in parts if part is not module):
        return "holds DistributedDataParallel inside; wrap the whole stage instead"
    composed: Any = _composable
    reduced = (part for part in parts if not isinstance(part, FSDPModule))
    if any("replicate" in (composed._get_registry(part) or {}) for part in reduced):
        return "has replicate on DistributedDataParallel's reducer; use the one of _composable.replicate_with_fsdp"
    if isinstance(module, DistributedDataParallel):
        return _reducer_problem(module, splits, has_optimizer)
    if not isinstance(module, FSDPModule):
        if any(isinstance(part, FSDPModule) for part in parts):
            return "has fully_shard on a part only; apply it to the whole stage too"
        return None
    problem = missing_name(module, FSDP_NAMES) or missing_name(module._get_fsdp_state(), FSDP_STATE_NAMES)
    if problem:
        return problem
    if splits and reshards_after_forward(module):
        return (
            "has fully_shard with reshard_after_forward, with which torch computes wrong gradients in split backwards "
            "(I and W), with or without freezing; apply it with reshard_after_forward=False"
        )
    return None


def _reducer_problem(module: DistributedDataParallel, splits: bool, has_optimizer: bool) -> Problem:
    static, unused, ends_alone = module.static_graph, module.find_unused_parameters, not has_optimizer
    problem = first_problem(
        {
            "and split backwards (I and W): torch then reduces no gradients, with or without freezing; "
            "use fully_shard": splits,
            "with static_graph=True, but every mask is another graph; leave it off": static,
            "with find_unused_parameters=True, which counts frozen parameters a second time; leave it off": unused,
            "which leaves zero gradients for the optimizer: pass it, attach(..., optimizer=optimizer)": ends_alone,
        }
    )
    return problem and f"is wrapped in DistributedDataParallel {problem}"


def _own_reduction(module: Any) -> Problem:
    """Return how a DDP module reduces gradients, if it does not wait for all gradients of its last backward."""
    refuse(missing_name(module, REDUCER_NAMES))
    mixed, delayed = module.mixed_precision is not None, bool(module._delay_all_reduce_params)
    return first_problem(
        {
            "with mixed_precision, whose own hooks change gradients in the backward": mixed,
            "with torch's Python reducer, which reduces each gradient by itself": module._use_python_reducer,
            "with delay_all_reduce_named_params, which reduces some gradients later": delayed,
        }
    )


def _optimizer_problem(schedule: Any, optimizers: Sequence[Any]) -> Problem:
    wrong = [optimizer for optimizer in optimizers if not isinstance(optimizer, torch.optim.Optimizer)]
    if wrong:
        return f"optimizer is a {type(wrong[0]).__name__}: allowed is a torch.optim.Optimizer, or several in a list"
    if not optimizers:
        return None
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    own = [id(p) for stage in stages_of(schedule) for p in stage.submod.parameters()]
    if not own or not updated.isdisjoint(own):
        return None
    return "the optimizer holds no parameter of this rank's stages"
