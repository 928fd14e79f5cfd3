"""What freezing can be right under in torch.distributed.pipelining, checked before any training starts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import schedules as host
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.errors import UnsupportedError
from tf_adapters.masking.compiled import COMPILED, is_compiled
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.torch_pipelining.replicas import reshards_after_forward
from tf_adapters.torch_pipelining.schedules import stages_of, translate

_SCHEDULE_SYMBOLS = ("_PipelineSchedule", "_PipelineScheduleRuntime", "PipelineScheduleSingle", "Schedule1F1B")
_STAGE_SYMBOLS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def check(schedule: Any, optimizers: Sequence[Any]) -> None:
    """Raise UnsupportedError, one line, if freezing with this schedule could be wrong."""
    refuse_grad_scaler()
    problem = _schedule_problem(schedule)
    if problem is None:
        translated = translate(schedule)
        problem = _first(
            *(_stage_problem(stage, translated, bool(optimizers)) for stage in stages_of(schedule)),
            _optimizer_problem(schedule, optimizers),
        )
    if problem:
        raise UnsupportedError(f"timely_freeze cannot run here: {problem}")


def refuse_grad_scaler() -> None:
    """Raise UnsupportedError where a GradScaler is in use: it skips an update on the rank that met an infinity only.

    The ranks' step counts would then differ, and they would wait for each other for ever.
    """
    if any(scaler.is_enabled() for scaler in _grad_scalers()):
        raise UnsupportedError(
            "timely_freeze cannot run here: a torch.amp.GradScaler is enabled, which skips updates on single ranks of "
            "a pipeline; use bfloat16 autocast, or GradScaler(enabled=False)"
        )


def _grad_scalers() -> list[torch.amp.GradScaler]:
    """Every GradScaler of this process. An instance refers to its class; asking each object takes a quarter second."""
    classes: list[type] = [torch.amp.GradScaler]
    for known in classes:
        classes.extend(known.__subclasses__())
    return [thing for thing in gc.get_referrers(*classes) if type(thing) in classes]


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem), None)


def _schedule_problem(schedule: Any) -> str | None:
    missing = [symbol for symbol in _SCHEDULE_SYMBOLS if not hasattr(host, symbol)]
    if missing:
        symbol = f"torch.distributed.pipelining.schedules.{missing[0]}"
        return f"torch {torch.__version__} has no {symbol}; 2.13 to 2.15 have it"
    if not isinstance(schedule, host._PipelineSchedule):
        return f"the schedule is a {type(schedule).__name__}; it needs one of torch.distributed.pipelining"
    single = isinstance(schedule, host.PipelineScheduleSingle)
    wanted = ("_has_backward", "_n_microbatches", *(("_stage", "_num_stages") if single else ("_stages",)))
    missing = [name for name in wanted if not hasattr(schedule, name)]
    if missing:
        return f"torch {torch.__version__}'s {type(schedule).__name__} has no {missing[0]}; 2.13 to 2.15 have it"
    if not schedule._has_backward:
        return "the schedule has no loss_fn, so it runs forwards only"
    if isinstance(schedule, host._PipelineScheduleRuntime):
        replaced = [kind for kind in schedule._comp_type_to_function_map if kind.value in _COMPUTATIONS]
        if replaced:
            return f"a custom function is registered for {replaced[0].name}; masks need the stages' own computations"
    return None


_COMPUTATIONS = {*(kind.value for kind in Kind), "OVERLAP_F_B"}


def _stage_problem(stage: Any, schedule: PipelineSchedule, has_optimizer: bool) -> str | None:
    missing = [symbol for symbol in _STAGE_SYMBOLS if not hasattr(stage, symbol)]
    if missing:
        return f"stage {stage.stage_index} is a {type(stage).__name__}, which has no {missing[0]}"
    if stage.dw_builder is not None:
        return f"stage {stage.stage_index} has a dw_builder, which computes weight gradients outside of autograd"
    if any(map(is_compiled, stage.submod.modules())):
        return COMPILED
    splits = any(a.stage == stage.stage_index and a.kind is Kind.WEIGHT_GRAD for a in schedule.actions)
    if splits and stage.is_first and not any(p.requires_grad for p in stage.submod.parameters()):
        return (
            f"stage {stage.stage_index} trains nothing, and in split backwards (I and W) torch then computes no "
            "gradients for the next stage, with or without freezing; use a schedule of whole backwards, such as 1F1B"
        )
    replica = _replica_problem(stage.submod, splits, has_optimizer)
    return f"stage {stage.stage_index} {replica}" if replica else None


def _replica_problem(module: Any, splits: bool, has_optimizer: bool) -> str | None:
    parts = list(module.modules())
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        return "is wrapped in FullyShardedDataParallel, whose flat parameters cannot be masked; use fully_shard"
    if any(isinstance(part, DistributedDataParallel) for part in parts if part is not module):
        return "holds DistributedDataParallel inside; wrap the whole stage instead"
    if isinstance(module, DistributedDataParallel):
        return _reducer_problem(module, splits, has_optimizer)
    if not isinstance(module, FSDPModule):
        if any(isinstance(part, FSDPModule) for part in parts):
            return "has fully_shard on a part only; apply it to the whole stage too"
    elif splits and reshards_after_forward(module):
        return (
            "has fully_shard with reshard_after_forward, with which torch computes wrong gradients in split backwards "
            "(I and W), with or without freezing; apply it with reshard_after_forward=False"
        )
    return None


def _reducer_problem(module: DistributedDataParallel, splits: bool, has_optimizer: bool) -> str | None:
    problem = None
    if splits:
        problem = (
            "and split backwards (I and W): torch then reduces no gradients, with or without freezing; use fully_shard"
        )
    elif module.static_graph:
        problem = "with static_graph=True, but every mask is another graph; leave it off"
    elif module.find_unused_parameters:
        problem = "with find_unused_parameters=True, which counts frozen parameters a second time; leave it off"
    elif not has_optimizer:
        problem = "which leaves zero gradients for the optimizer: pass it, attach(..., optimizer=optimizer)"
    return problem and f"is wrapped in DistributedDataParallel {problem}"


def _optimizer_problem(schedule: Any, optimizers: Sequence[Any]) -> str | None:
    wrong = [optimizer for optimizer in optimizers if not isinstance(optimizer, torch.optim.Optimizer)]
    if wrong:
        return f"optimizer is a {type(wrong[0]).__name__}: allowed is a torch.optim.Optimizer, or several in a list"
    if not optimizers:
        return None
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) in updated for stage in stages_of(schedule) for p in stage.submod.parameters()):
        return None
    return "the optimizer holds no parameter of this rank's stages"
