"""Freezing inside Megatron-Core's pipeline schedules, for one model on this rank.

The patches in ``megatron_patches`` pass it every batch, forward and backward of its model chunks. Everything else is
set on the chunks and the optimizer, and ``detach()`` removes it.
Source: megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_patches.forward_backward import Batch
from tf_adapters.collectives import Collectives, holds_first_rank, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.hosts.boundaries import HeldSinceUpdate, UpdateSteps
from tf_adapters.hosts.late import LateNorms
from tf_adapters.hosts.layers import layers_of
from tf_adapters.hosts.links import Links
from tf_adapters.hosts.waiting import WaitingWeights
from tf_adapters.log import announce
from tf_adapters.measuring.timer import clock_for
from tf_adapters.megatron.chunks import Chunk, device_of
from tf_adapters.megatron.ddp import before_reduction
from tf_adapters.megatron.late_norm import meetings, own_norm
from tf_adapters.megatron.linear import tapped_layer
from tf_adapters.megatron.optimizers import HeldParameters, held_values, leaves, scale_gradients
from tf_adapters.megatron.ordered import OrderedBatch, is_replaceable
from tf_adapters.megatron.placement import position
from tf_adapters.megatron.schedules import translate
from tf_adapters.megatron.tags import tag
from tf_adapters.megatron.units import chunk_units, tied_places
from tf_adapters.report.observer import MetricSink
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.selection.freeze_units import Tie
from tf_adapters.training.batches import MOST_NUMBERS
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.taps import StageTaps

HOST = HostInfo("megatron-core", metadata.version("megatron-core"))
ATTRIBUTE = "timely_freeze"  # of a model chunk: its adapter
TIMER = "timely-freeze"  # Megatron's timer for our own work between batches


@dataclass(frozen=True)
class MegatronModel:
    """A model as Megatron trains it on this rank: its chunks, their optimizer, and its place in the pipeline.

    ``config`` is the TransformerConfig, and ``num_microbatches`` the number of microbatches in a training batch.
    ``microbatch_size`` is in samples, None where Megatron does not know it. ``moves_forwards`` says whether a plan may
    also move forwards, and ``norm_can_be_late`` whether all ranks only log the norm of the gradients.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: Any
    config: Any
    num_microbatches: int
    pp_group: Any
    expert_parallel_size: int = 1
    microbatch_size: int | None = None
    moves_forwards: bool = False
    norm_can_be_late: bool = False
    updates_together: bool = False


class MegatronAdapter(HostAdapter):
    """Runs a Controller for one model. Made by ``tf_adapters.megatron.attach``."""

    def __init__(
        self,
        model: MegatronModel,
        config: TimelyFreezeConfig,
        collectives: Collectives,
        metrics: MetricSink | None = None,
        warmup_steps: int | None = None,
    ) -> None:
        self._model = model
        self._warmup_steps = DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps
        self._batch_seen = False
        self._in_batch = False  # whether a training batch runs
        self._waiting: WaitingWeights | None = None
        self._ordered: OrderedBatch | None = None
        self._norm_is_late = config.defers and model.norm_can_be_late
        self._late_norms: LateNorms | None = None
        self._unscaled: set[int] = set()  # stages whose gradients are not yet scaled in this step
        self.collectives = collectives
        on_all_ranks(collectives, self._take_place)
        translated = functools.partial(translate, collectives, self._position, model.config, pp_group=model.pp_group)
        self._orders = functools.lru_cache(MOST_NUMBERS)(translated)
        self._orders(model.num_microbatches)  # it communicates, which describe() must not
        super().__init__(config, collectives, self._describe, metrics)
        self._steps = UpdateSteps(self.controller, collectives, optimizers=1, together=model.updates_together)
        self._held = HeldSinceUpdate((model.optimizer,))

    def _take_place(self) -> None:
        model = self._model
        self._links = Links(model.pp_group)
        self._position = position(model.pp_group, model.chunks, model.config)
        self._chunks = {id(c): Chunk(self._position.stage(index), c) for index, c in enumerate(model.chunks)}
        self._by_stage = {chunk.stage: chunk for chunk in self._chunks.values()}

    def connect(self) -> None:
        model = self._model
        if self._norm_is_late:
            group = model.optimizer.chained_optimizers[0].get_grad_stats_parallel_group()
            self._late_norms = LateNorms(group, device_of(model.chunks))
            self.on_detach(self._late_norms.close)

    def install(self) -> None:
        """Hook the chunks, and replace the optimizer's step."""
        model = self._model
        self._holders = [HeldParameters(leaf) for leaf in leaves(model.optimizer)]
        for holder in self._holders:
            self.around_steps(holder.inner, holder.before, holder.after)
        self.overrides.wrap(model.optimizer, "step", self._step)
        if (norms := self._late_norms) is not None:
            optimizers, device = model.optimizer.chained_optimizers, device_of(model.chunks)
            self.overrides.set(model.optimizer, "get_grad_norm", lambda: norms.norm(own_norm(optimizers, device)))
        for wrapped in model.chunks:
            self.overrides.set(wrapped, ATTRIBUTE, self)
            if self.config.gradient_scale != "skipped_as_zero" and isinstance(wrapped, DistributedDataParallel):
                stage = self._chunks[id(wrapped)].stage
                self.overrides.wrap(wrapped, "finish_grad_sync", functools.partial(self._finish_grad_sync, stage))
        for chunk in self._chunks.values():
            self.on_detach(chunk.close)
            chunk.hook(model.config)

    def _describe(self) -> HostPipeline:
        model, by_stage = self._model, self._by_stage
        parameters = {stage: chunk.parameters for stage, chunk in by_stage.items()}
        tapped = by_stage if self.config.splits_backwards else {}
        layer = functools.partial(tapped_layer, sampled=self.config.samples_tokens)
        return HostPipeline(
            host=HOST,
            taps={stage: StageTaps(chunk.model, layer) for stage, chunk in tapped.items()},
            schedule=self._orders(model.num_microbatches),
            units={
                stage: chunk_units(chunk.model, model.config, model.expert_parallel_size)
                for stage, chunk in by_stage.items()
            },
            parameters=parameters,
            models={stage: chunk.model for stage, chunk in by_stage.items()},
            layers={stage: layers_of(chunk.model) for stage, chunk in by_stage.items()},
            held_values=held_values(model.optimizer, parameters),
            microbatch_size=model.microbatch_size,
            moves_forwards=model.moves_forwards,
            traced=holds_first_rank(model.pp_group),
            meetings=meetings(model.chunks, model.optimizer, model.config, self._norm_is_late),
            warmup_steps=self._warmup_steps,
            clock=clock_for(device_of(model.chunks)),
        )

    def ties(self, pipeline: HostPipeline) -> tuple[Tie, ...]:
        """Return the embedding that the first and the last stage share."""
        of_ranks = on_all_ranks(self.collectives, lambda: tied_places(pipeline.parameters))
        everywhere = {place for places in of_ranks for place in places}
        return (tuple(sorted(everywhere)),) if len(everywhere) > 1 else ()

    @property
    def statistics_agree(self) -> bool:
        """Return whether the optimizer's success and norm are equal on all ranks without a reduction."""
        return self._late_norms is not None and not self._detached

    # --- what the patches call -------------------------------------------------------------------------------

    @contextmanager
    def batch(self, batch: Batch) -> Iterator[None]:
        """Run one training batch inside."""
        with self._timed():
            self._steps.before_batch()  # all ranks run the batch, but an update may come on some of them only
        if batch.num_microbatches != self.controller.state.microbatches:
            self.controller.reschedule(self._orders(batch.num_microbatches))
        self.controller.begin_step()
        self._steps.begin_batch()
        self._held.add_batch(self.controller.held_parameters())
        self._batch_seen = True
        self._follow_plan(batch)
        self._in_batch = True
        self._unscaled = set(self._by_stage)
        ordered = self._ordered.without_transfers() if self._ordered else nullcontext()
        try:
            with before_reduction(self._model.config, self._finish_weight_gradients), ordered:
                yield
            self._finish_weight_gradients()
        finally:
            if self._ordered is not None:
                self._ordered.close()
            self._in_batch, self._waiting, self._ordered = False, None, None

    def forward(self, run: functools.partial[Any], model: torch.nn.Module, microbatch: int | None) -> Any:
        """Run one microbatch's forward through one chunk, masked and timed; outside a training batch, just run it."""
        if not self._in_batch or microbatch is None:
            return run()
        chunk = self._chunks[id(model)]
        if self._ordered is not None:
            result = self._ordered.answer_forward(run, chunk.stage, microbatch)
        else:
            result = self._run(run, Action(chunk.stage, Kind.FORWARD, microbatch))
        tag(result[0], (self, chunk, microbatch))
        return result

    def backward(self, run: Callable[[], Any], chunk: Chunk, microbatch: int) -> Any:
        """Run one microbatch's backward through one chunk, masked and timed."""
        if self._ordered is not None:
            return self._ordered.answer_backward(chunk.stage, microbatch)
        waiting = self._waiting
        kind = waiting.backward_kind(chunk.stage, microbatch) if waiting else Kind.BACKWARD
        return self._run(run, Action(chunk.stage, kind, microbatch))

    def compute_waiting(self) -> None:
        """Compute the weight gradients that the plan has placed where this rank now waits."""
        if self._waiting is not None:
            self._waiting.run()

    def _finish_weight_gradients(self, chunk: int | None = None) -> None:
        """Compute the remaining weight gradients of one model chunk, or of all, before they are reduced."""
        stage = None if chunk is None else self._position.stage(chunk)
        if self._ordered is not None:
            self._ordered.finish(stage)
        elif self._waiting is not None:
            self._waiting.finish(stage)

    def _run(self, run: Callable[[], Any], action: Action) -> Any:
        self.compute_waiting()
        chunk = self._by_stage[action.stage]
        mask = self.controller.mask(action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD:
            chunk.gradients.report(mask.names)
        with chunk.masked(mask), self.controller.running(action):
            result = run()
        if action.kind is not Kind.FORWARD:
            chunk.gradients.ready_as_now()
        if self._waiting is not None:
            self._waiting.passed(action)
        return result

    def _follow_plan(self, batch: Batch) -> None:
        """Prepare this batch to run as the plan orders; do nothing if the plan's order is the host's.

        If forwards may move and transfers can be skipped, the batch runs in the plan's order. In other pipelines the
        host's order stays, and only the deferred weight gradients run where the plan has put them. The host itself
        cannot run chunks in a V.
        """
        order, in_v = self.controller.execution, self._position.in_v
        if order is self.controller.schedule and not in_v:
            return
        if not in_v and not (self._model.moves_forwards and is_replaceable(batch, self._model.pp_group)):
            self._waiting = WaitingWeights(order.ranks[self._position.rank], self._compute)
            return
        self._ordered = OrderedBatch(
            batch,
            order,
            tuple(self._chunks.values()),
            position=self._position,
            receives=self.receives(order),
            links=self._links,
            run=self._run,
            compute=self._compute,
        )

    def _compute(self, action: Action, last: bool) -> None:
        """Compute the weight gradients of a W, which may be its stage's ``last`` one."""
        chunk = self._by_stage[action.stage]
        with chunk.gradients.accumulating(last):
            if last:
                chunk.gradients.report(self.controller.mask(action.stage, action.microbatch).names)
            self.controller.compute_weight_gradients(action.stage, action.microbatch)

    def _step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, then close our step on this rank."""
        if not self.controller.in_step:
            self._warn_unseen()
            return run(*args, **kwargs)
        with self._timed():
            for stage in tuple(self._unscaled):  # without DistributedDataParallel
                self._scale(stage)
            self._hold(self._held.take(self._model.optimizer))
        try:
            result = run(*args, **kwargs)
        finally:
            self._hold(())
        with self._timed():
            self._steps.stepped(id(self._model.optimizer))
        return result

    def finish_step(self) -> None:
        self._steps.finish()

    def _hold(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        held = tuple(parameters)
        for holder in self._holders:
            holder.hold(held)

    def _finish_grad_sync(self, stage: int, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        self._scale(stage)  # before the gradients of a tied embedding's other stage are added

    def _scale(self, stage: int) -> None:
        """Scale a chunk's gradients, once a step."""
        if self.controller.in_step and stage in self._unscaled:
            self._unscaled.discard(stage)
            scale_gradients(self.controller.gradient_scales().get(stage, ()))

    # --- details ---------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count our time in Megatron's timers, if the model's config has them."""
        timers = self._model.config.timers
        if timers is not None:
            timers(TIMER, log_level=1).start()
        try:
            yield
        finally:  # a timer that runs already refuses to start
            if timers is not None:
                timers(TIMER).stop()

    def _warn_unseen(self) -> None:
        if not self._batch_seen:
            self._batch_seen = True
            announce(
                self.collectives.rank,
                "the optimizer stepped, but no batch was seen: call get_forward_backward_func() after attach() or "
                "install(); until then nothing is frozen",
                logging.WARNING,
            )


def adapter_of(model: Any) -> MegatronAdapter | None:
    """Return the adapter of a model chunk, or of the first in a list of chunks; None without one."""
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    return vars(chunk).get(ATTRIBUTE) if isinstance(chunk, torch.nn.Module) else None
