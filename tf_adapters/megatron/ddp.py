"""Make Megatron's DistributedDataParallel work with frozen parameters.

DDP counts the parameters of each bucket as their gradients arrive, and reduces the bucket when all have arrived. It
also waits for a parameter's all-gather in the forward that uses it. Both assume that every parameter trains in every
microbatch. Source: megatron/core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py, and for
``before_reduction`` megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from tf_adapters.overrides import Overrides


class FrozenGradients:
    """Handles one model chunk's data parallelism while some of its parameters are frozen.

    ``chunk`` is the chunk of the schedule. Without DistributedDataParallel around the model there is nothing to do.
    """

    def __init__(self, chunk: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._ddp = chunk if isinstance(chunk, DistributedDataParallel) else None
        self._hidden: dict[torch.nn.Parameter, Any] = {}
        self._hooks: list[Any] = []
        self._ready: list[bool] = []  # for each group of buckets, from the newest backward

    def __deepcopy__(self, memo: Any) -> FrozenGradients:
        """Return this object: a copy of the model reduces no gradients."""
        return self

    def hook(self) -> None:
        """Put our hooks on the model if DDP gathers parameters in the forward."""
        if self._ddp is not None and self._ddp.use_forward_hook:
            self._hooks = [m.register_forward_pre_hook(self._finish_gather) for m in self._ddp.module.modules()]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def hidden(self, names: tuple[str, ...]) -> Iterator[None]:
        """Hide these frozen parameters from DDP's forward hook, which asserts that each gathered parameter trains.

        Our hook waits for their all-gathers instead, in the module that uses them, so the gathers still overlap.
        """
        if not self._hooks or self._ddp is None or not self._ddp.remove_forward_pre_hook_handles:
            yield
            return
        groups = self._ddp.param_to_bucket_group
        frozen = [parameter for parameter in map(self._parameters.__getitem__, names) if parameter in groups]
        self._hidden = {parameter: groups.pop(parameter) for parameter in frozen}
        try:
            yield
        finally:
            groups.update(self._hidden)
            self._hidden = {}

    @contextmanager
    def kept_totals(self, names: tuple[str, ...]) -> Iterator[None]:
        """Restore the ``main_grad`` of these frozen parameters if a backward has removed it.

        With fused accumulation, Transformer Engine's grouped linear layer removes it (seen in 2.10.0, not in 2.4.0 or
        2.20.2). Its next backward would fail.
        """
        frozen: list[Any] = [self._parameters[name] for name in names]
        totals = [(parameter, parameter.main_grad) for parameter in frozen if hasattr(parameter, "main_grad")]
        try:
            yield
        finally:
            for parameter, total in totals:
                if parameter.main_grad is None:
                    parameter.main_grad = total

    def report(self, names: tuple[str, ...]) -> None:
        """Report these parameters' gradients as ready, before the backward computes the others.

        Without the report, ``overlap_grad_reduce`` would never reduce their bucket. A report after the backward would
        reduce it too late to overlap.
        """
        ddp = self._ddp
        if ddp is None or not ddp.ddp_config.overlap_grad_reduce:
            return
        for parameter in map(self._parameters.__getitem__, names):
            group = ddp.param_to_bucket_group.get(parameter)
            if group is not None and group.is_last_microbatch:
                group.register_grad_ready(parameter, ddp.force_all_reduce)

    def ready_as_now(self) -> None:
        """Note for each group of buckets whether a backward just reported gradients as ready (``is_last_microbatch``).

        The host sets this flag before the last backward of a batch. If all ranks reduce at the same time, it does not.
        The last deferred weight gradients use the flags noted here (``accumulating``).
        """
        self._ready = [group.is_last_microbatch for group in self._groups]

    @contextmanager
    def reported(self, ready: bool) -> Iterator[None]:
        """Run a forward or backward inside. ``ready`` says whether its gradients are the last ones of the batch.

        It replaces what the host says, which assumes the host's own order.
        """
        with self._flags([ready] * len(self._groups)):
            yield

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Compute deferred weight gradients inside. The ``last`` ones of a batch may be reduced."""
        with self._flags([ready and last for ready in self._ready]):
            yield

    @contextmanager
    def _flags(self, flags: Sequence[bool]) -> Iterator[None]:
        """Set each group's ``is_last_microbatch`` inside."""
        groups = self._groups
        before = [group.is_last_microbatch for group in groups]
        for group, flag in zip(groups, flags, strict=True):
            group.is_last_microbatch = flag
        try:
            yield
        finally:
            for group, flag in zip(groups, before, strict=True):
                group.is_last_microbatch = flag

    @property
    def _groups(self) -> list[Any]:
        return [] if self._ddp is None else [*self._ddp.bucket_groups, *self._ddp.expert_parallel_bucket_groups]

    def _finish_gather(self, module: torch.nn.Module, *_: Any) -> None:
        if not self._hidden or self._ddp is None:
            return
        ddp = self._ddp
        dispatched_elsewhere = ddp.ddp_config.align_param_gather or ddp.overlap_param_gather_with_optimizer_step
        for parameter in module.parameters(recurse=False):
            group = self._hidden.get(parameter)
            if group is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=dispatched_elsewhere)


@contextmanager
def before_reduction(config: Any, finish: Callable[[int | None], None]) -> Iterator[None]:
    """Run a batch inside. ``finish`` is called before the host reduces the gradients of a chunk, or of all (None).

    Megatron's interleaved schedule makes a list of a single ``grad_sync_func``, one entry for each chunk. The config
    keeps that list after the batch, with the given function in it.
    """
    given, sync, finalize = config.grad_sync_func, config.grad_sync_func, config.finalize_model_grads_func
    if isinstance(sync, (list, tuple)):
        sync = [_after(finish, function, chunk) for chunk, function in enumerate(sync)]
    elif sync is not None:
        sync = _after(finish, sync)
    with Overrides() as overrides:
        if finalize is not None:
            overrides.set(config, "finalize_model_grads_func", _after(finish, finalize))
        config.grad_sync_func = sync
        try:
            yield
        finally:
            config.grad_sync_func = _without(config.grad_sync_func, sync, given)


def _after(finish: Callable[[int | None], None], run: Callable[..., Any], chunk: int | None = None) -> Any:
    """Return a function that calls ``finish(chunk)``, then ``run`` with its arguments."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        finish(chunk)
        return run(*args, **kwargs)

    return call


def _without(found: Any, ours: Any, given: Any) -> Any:
    """Return ``found`` with the host's ``given`` function or functions instead of ``ours``."""
    if found is ours:
        return given
    if isinstance(found, (list, tuple)):
        return type(found)(given if function is ours else function for function in found)
    return found  # other code has set another one
