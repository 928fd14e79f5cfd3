"""Freezing on torch.distributed.pipelining, through the stages' own forward and backward of one microbatch.

It sets attributes of this rank's stage objects and of the schedule object, and hooks on the optimizers. ``detach()``
removes them all.
Source: torch/distributed/pipelining/schedules.py and stage.py.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tf_adapters.collectives import Collectives, holds_first_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.hosts.boundaries import HeldSinceUpdate, UpdateSteps
from tf_adapters.hosts.layers import layers_of
from tf_adapters.hosts.units import units_of
from tf_adapters.measuring.timer import clock_for
from tf_adapters.report.observer import MetricSink
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.torch_pipelining.execution import RewrittenOrder, runs_metadata_pass
from tf_adapters.torch_pipelining.replicas import (
    frozen_replica,
    inside_replica,
    is_replicated,
    layers_with_taps,
    reduce_gradients,
    reduces_in_backward,
    reported_to_reducer,
    trained_replica,
    unsharded_adder,
)
from tf_adapters.torch_pipelining.schedules import stages_of, translate
from tf_adapters.torch_pipelining.support import refuse_grad_scaler, replaced_backward
from tf_adapters.torch_pipelining.units import (
    gradient_norm,
    held_values,
    local_gradient,
    shared_parameters,
    trained_by_loss,
    with_alike_gradients,
)
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.taps import StageTaps

HOST = HostInfo("torch.distributed.pipelining", torch.__version__)
ATTRIBUTE = "timely_freeze"  # of the schedule: its adapter


class TorchPipeliningAdapter(HostAdapter):
    """Runs a Controller inside one schedule object. Made by ``tf_adapters.torch_pipelining.attach``.

    Masks apply inside ``forward_one_chunk`` and the two backwards of a stage. They never apply to the first step's
    metadata pass, which stores ``requires_grad``. The last stage's loss is computed between its forward and its
    backward; its time belongs to the measured rest of the step.
    """

    def __init__(
        self,
        schedule: Any,
        config: TimelyFreezeConfig,
        collectives: Collectives,
        optimizers: Sequence[torch.optim.Optimizer],
        metrics: MetricSink | None = None,
        warmup_steps: int | None = None,
        meetings: Sequence[str] = (),
    ) -> None:
        self.schedule = schedule
        self._scaler_checked = False
        self._sent_bytes: dict[tuple[int, Kind], int] = {}
        self._in_batch = False  # whether a training batch runs
        self._backwards: Counter[int] = Counter()  # by stage, in this batch
        self._scaled: list[tuple[torch.Tensor, float]] = []  # scaled gradients and their scales

        def describe() -> HostPipeline:
            self._stages = stages_of(schedule)
            order = translate(schedule)
            self._split = {action.stage for action in order.actions if action.kind is Kind.WEIGHT_GRAD}
            self._replaced = {
                stage.stage_index: reason for stage in self._stages if (reason := replaced_backward(stage)) is not None
            }
            models = {stage.stage_index: inside_replica(stage.submod) for stage in self._stages}
            parameters = {stage: dict(model.named_parameters()) for stage, model in models.items()}
            tapped = self._stages if config.splits_backwards else ()
            return HostPipeline(
                host=HOST,
                schedule=order,
                units={stage: _units(schedule, model) for stage, model in models.items()},
                parameters=parameters,
                models=models,
                layers={stage: layers_of(model) for stage, model in models.items()},
                ties=shared_parameters(parameters),
                held_values=held_values(parameters),
                taps={stage.stage_index: self._taps(stage) for stage in tapped},
                host_backwards=self._replaced,
                moves_forwards=True,
                sent_bytes=self._sent_bytes,
                traced=holds_first_rank(self._stages[0].group),
                meetings=meetings,
                warmup_steps=DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps,
                clock=clock_for(torch.device(self._stages[0].device)),
            )

        super().__init__(config, collectives, describe, metrics)
        self._optimizers = tuple(optimizers)
        self._steps = UpdateSteps(self.controller, collectives, len(self._optimizers))
        self._held = HeldSinceUpdate(self._optimizers)

    def _taps(self, stage: Any) -> StageTaps:
        """Return the taps of a stage: none where the stage's own backward needs the weight gradients."""
        layer = layers_with_taps(stage.submod, self.config.samples_tokens)
        if stage.stage_index in self._replaced:
            layer = lambda _: None  # noqa: E731
        return StageTaps(
            inside_replica(stage.submod),
            layer,
            unsharded_adder(stage.submod),
            by_name=True,
            sole=not is_replicated(stage.submod),
        )

    def install(self) -> None:
        """Hook the optimizers, and mask and time the computations of the stages."""
        for optimizer in self._optimizers:
            self.around_steps(optimizer, self._before_update, self._after_update)
        overrides = self.overrides
        overrides.wrap(self.schedule, "step", self._step)
        overrides.set(self.schedule, ATTRIBUTE, self)
        if self.config.defers:
            rewritten = RewrittenOrder(self.schedule, self._loss)
            overrides.wrap(self.schedule, "_step_microbatches", functools.partial(self._batch, rewritten))
            kinds = (("get_fwd_send_ops", Kind.FORWARD), ("get_bwd_send_ops", Kind.BACKWARD))
            for stage, (name, kind) in itertools.product(self._stages if rewritten.keeps_sent else (), kinds):
                overrides.wrap(stage, name, functools.partial(self._sends, (stage.stage_index, kind)))
        overrides.wrap(self.schedule, "_maybe_compute_loss", self._loss)
        for stage in self._stages:
            overrides.wrap(stage, "forward_one_chunk", functools.partial(self._forward, stage))
            overrides.wrap(stage, "backward_one_chunk", functools.partial(self._backward, stage))
            overrides.wrap(stage, "backward_weight_one_chunk", functools.partial(self._weight_gradients, stage))

    # --- the update ------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip gradients by their 2-norm over all stages, as ``torch.nn.utils.clip_grad_norm_`` does for one process.

        Call it on all ranks after ``schedule.step()`` and before the optimizer's step, with the parameters of this
        rank's stages. Returns the norm before clipping.
        """
        stage, alike = self._stages[0], with_alike_gradients(parameters)
        total = torch.zeros((), device=stage.device)
        for group in alike:
            total += gradient_norm(group) ** 2
        dist.all_reduce(total, group=stage.group)
        total = total.sqrt()
        for group in alike:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    # --- the host's step -------------------------------------------------------------------------------------

    def _step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.schedule._has_backward:  # eval() also runs step()
            return run(*args, **kwargs)
        # Several batches may accumulate gradients for one update. All of them take the step's masks. The executed order
        # and the step's time are those of the last batch. Ranks decide before a batch, which all of them run: an update
        # may come on some ranks only.
        if not self._scaler_checked:  # a GradScaler may have been made after attaching; it is the same on every rank
            refuse_grad_scaler()
            self._scaler_checked = True
        self._steps.before_batch()
        self._unscale()
        self.controller.begin_step()
        if self._optimizers:
            self._steps.begin_batch()
            self._held.add_batch(self.controller.held_parameters())
        self._leave_first_microbatch()
        self._in_batch = True
        self._backwards.clear()
        try:
            result = run(*args, **kwargs)
        finally:
            self._in_batch = False
        self._scale()
        if not self._optimizers:
            self.controller.end_step()
        return result

    def _leave_first_microbatch(self) -> None:
        """Leave the first microbatch to the host where DDP's reducer reduces its gradients by themselves.

        The metadata pass, which also follows each evaluation, makes the reducer expect gradients in the first backward.
        """
        expected = runs_metadata_pass(self.schedule)
        for stage in self._stages:
            taps = self.controller.pipeline.taps.get(stage.stage_index)
            if taps is not None:
                taps.untapped = 0 if expected and reduces_in_backward(stage.submod) else None

    def finish_step(self) -> None:
        self._steps.finish()

    def _batch(self, rewritten: RewrittenOrder, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a batch in the order of ``controller.execution``."""
        order = self.controller.execution
        if not self._in_batch or order is self.controller.schedule:
            return run(*args, **kwargs)
        return rewritten.run(order, *args, **kwargs)

    def _scale(self) -> None:
        """Scale the gradients after a batch: they have been reduced, and the user may clip them before the update."""
        scales = (scale for of_stage in self.controller.gradient_scales().values() for scale in of_stage)
        self._scaled = [(gradient, factor) for p, factor in scales if (gradient := local_gradient(p)) is not None]
        for gradient, factor in self._scaled:
            gradient.mul_(factor)

    def _unscale(self) -> None:
        """Undo the scaling before another batch adds its gradients for the same update."""
        for gradient, factor in () if self._steps.boundaries.has_updated else self._scaled:
            gradient.div_(factor)
        self._scaled = []

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of held parameters, so that the optimizer skips them.

        ``zero_grad(set_to_none=False)`` or a reducer would leave zeros, and momentum and decay would still move the
        parameter.
        """
        for parameter in self._held.take(optimizer):
            parameter.grad = None

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Close the step on this rank if this optimizer is the last one. The update of another rank may not come."""
        self._steps.stepped(id(optimizer))

    # --- a stage's computations ------------------------------------------------------------------------------

    def _forward(self, stage: Any, run: Callable[..., Any], fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._action(stage, Kind.FORWARD, fwd_chunk_id):
            return run(fwd_chunk_id, *args, **kwargs)

    def _sends(self, place: tuple[int, Kind], run: Callable[[int], list[Any]], microbatch: int) -> list[Any]:
        operations = run(microbatch)
        self._sent_bytes[place] = sum(operation.tensor.nbytes for operation in operations)
        return operations

    def _loss(
        self,
        run: Callable[..., None],
        stage: Any,
        output: Any,
        targets: Any,
        microbatch: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not (self._in_batch and stage.is_last):
            run(stage, output, targets, microbatch, *args, **kwargs)
            return
        frozen = trained_replica(stage.submod, self.controller.mask(stage.stage_index, microbatch).names)
        with self.controller.around_loss(stage.stage_index, microbatch), frozen_replica(stage.submod, frozen):
            run(stage, output, targets, microbatch, *args, **kwargs)

    def _defers(self, stage: Any) -> bool:
        """Return whether an I of this stage is the host's whole backward, from which taps defer weight gradients.

        If the stage's backward is not torch's, an I that a plan has made is whole too, and its W computes nothing.
        """
        index = stage.stage_index
        tapped = index in self.controller.pipeline.taps and not (index in self._replaced and index in self._split)
        return self._in_batch and tapped

    def _backward(
        self,
        stage: Any,
        run: Callable[..., None],
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        # If taps defer the weight gradients, the host's full backward is only an input gradient.
        whole = full_backward or self._defers(stage)
        kind = Kind.BACKWARD if full_backward else Kind.INPUT_GRAD
        self._backwards[stage.stage_index] += 1
        if whole and not full_backward and stage.stage_index in self._replaced:  # torch would say it to the W
            last_backward = self._backwards[stage.stage_index] == self.controller.state.microbatches
        reduces = self._reduces(stage) and bwd_chunk_id in self.controller.pipeline.taps[stage.stage_index].recorded
        of_host = last_backward and not reduces
        with self._reported(stage, bwd_chunk_id, of_host), self._action(stage, kind, bwd_chunk_id):
            run(bwd_chunk_id, loss=loss, full_backward=whole, last_backward=of_host)
        if reduces and last_backward:
            reduce_gradients(stage.submod)

    def _reduces(self, stage: Any) -> bool:
        """Return whether we reduce a stage's gradients where taps compute the last ones.

        The host reduces them in its last backward, which would be too early.
        """
        tapped = self._in_batch and stage.stage_index in self.controller.pipeline.taps
        return tapped and reduces_in_backward(stage.submod)

    def _reported(self, stage: Any, microbatch: int, last: bool) -> AbstractContextManager[None]:
        if not self._in_batch:
            return nullcontext()
        first = self._backwards[stage.stage_index] == 1
        names = self.controller.mask(stage.stage_index, microbatch).names
        return reported_to_reducer(stage.submod, names, first=first, last=last)

    def _weight_gradients(
        self, stage: Any, run: Callable[..., None], bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        if self._defers(stage):
            if last_backward and self._reduces(stage):
                taps = self.controller.pipeline.taps[stage.stage_index]
                reduce_gradients(stage.submod, except_for=taps.waiting(bwd_chunk_id))
            self.controller.compute_weight_gradients(stage.stage_index, bwd_chunk_id)
            return
        with self._action(stage, Kind.WEIGHT_GRAD, bwd_chunk_id):
            run(bwd_chunk_id, last_backward=last_backward)

    @contextmanager
    def _action(self, stage: Any, kind: Kind, microbatch: int) -> Iterator[None]:
        """Mask and time one computation of a training batch inside. Evaluation runs without either."""
        if not self._in_batch:
            yield
            return
        action = Action(stage.stage_index, kind, microbatch)
        frozen = trained_replica(stage.submod, self.controller.mask(stage.stage_index, microbatch).names)
        with self.controller.running(action), frozen_replica(stage.submod, frozen):
            yield


def _units(schedule: Any, model: torch.nn.Module) -> tuple[FreezeUnit, ...]:
    """Return a stage's units. Parameters that the loss trains are never frozen."""
    outside = trained_by_loss(schedule._loss_fn, model)
    return tuple(unit for unit in units_of(model) if outside.isdisjoint(unit.names))
