"""Freezing inside Megatron-Core's pipeline schedules, for one model on this rank.

The patches in ``megatron_patches`` hand it every batch, forward and backward of its model chunks; everything else is
set on the chunks and the optimizer themselves and taken off again by ``detach()``.
Source: megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch

from tf_adapters.collectives import ProcessGroupCollectives, holds_first_rank, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.log import announce
from tf_adapters.masking.rows import RowMask, row_layers, with_rows
from tf_adapters.megatron.chunks import Chunk
from tf_adapters.megatron.optimizers import HeldParameters, held_values
from tf_adapters.megatron.rows import parallel_layer
from tf_adapters.megatron.schedules import PipelinePosition, translate
from tf_adapters.megatron.units import tied_places, units_of
from tf_adapters.overrides import Overrides
from tf_adapters.report.observer import MetricSink
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.selection.units import Tie
from tf_adapters.timing.timer import clock_for
from tf_adapters.training.agreement import gather_units
from tf_adapters.training.controller import Controller, HostInfo
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS

ATTRIBUTE = "timely_freeze"  # of a model chunk: its adapter
TIMER = "timely-freeze"  # among Megatron's timers: what freezing itself takes between the batches
_TAG = "timely_freeze_action"  # of a forward's output: what its backward is


class MegatronAdapter:
    """Runs a Controller for one model. Made by ``tf_adapters.megatron.attach``."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        model_config: Any,
        config: TimelyFreezeConfig,
        num_microbatches: int,
        pp_group: Any,
        expert_parallel_size: int = 1,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        metrics: MetricSink | None = None,
    ) -> None:
        self._model_config, self._pp_group = model_config, pp_group
        self._position = PipelinePosition(pp_group.rank(), pp_group.size(), len(chunks))
        self._chunks = {id(c): Chunk(self._position.stage(index), c) for index, c in enumerate(chunks)}
        self._num_microbatches = num_microbatches
        self._collectives = ProcessGroupCollectives()
        self._in_batch = False
        self._batch_seen = False
        by_stage = {chunk.stage: chunk for chunk in self._chunks.values()}
        parameters = {stage: chunk.parameters for stage, chunk in by_stage.items()}
        by_rows = by_stage if config.granularity == "row" else {}
        self._row_masks = {stage: RowMask(row_layers(c.model, parallel_layer)) for stage, c in by_rows.items()}
        units = {stage: units_of(chunk.model, model_config, expert_parallel_size) for stage, chunk in by_stage.items()}
        self.controller = Controller(
            config=config,
            schedule=self._translate(num_microbatches),
            units=gather_units(self._collectives, with_rows(units, self._row_masks)),
            parameters=parameters,
            collectives=self._collectives,
            clock=clock_for(next(chunks[0].parameters()).device),
            host=HostInfo("megatron-core", metadata.version("megatron-core")),
            ties=_ties(self._collectives, parameters),
            auto_warmup=warmup_steps,
            metrics=metrics,
            held_values=held_values(optimizer, parameters),
            traced=holds_first_rank(pp_group),
            row_masks=self._row_masks,
        )
        self._holder = HeldParameters(optimizer)
        self._overrides = Overrides()
        self._host_step: Callable[..., Any] = optimizer.step
        self._overrides.set(optimizer, "step", self._step)
        for chunk in chunks:
            self._overrides.set(chunk, ATTRIBUTE, self)
        for stage_chunk in by_stage.values():
            stage_chunk.hook(model_config)

    # --- on and off ------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give model and optimizer back as they were. Call it on all ranks, between two training batches."""
        self._overrides.restore()
        self._holder.remove()
        for chunk in self._chunks.values():
            chunk.close()
        for mask in self._row_masks.values():
            mask.remove()
        self.controller.close()

    # --- what the patches call -------------------------------------------------------------------------------

    @contextmanager
    def batch(self, num_microbatches: int) -> Iterator[None]:
        """Around one training batch."""
        if num_microbatches != self._num_microbatches:
            self._num_microbatches = num_microbatches
            self.controller.reschedule(self._translate(num_microbatches))
        self.controller.begin_step()
        self._in_batch = self._batch_seen = True
        try:
            yield
        finally:
            self._in_batch = False

    def forward(self, run: Callable[[], Any], model: torch.nn.Module, microbatch: int | None) -> Any:
        """Run one microbatch's forward through one chunk, masked and timed; outside a training batch, just run it."""
        if not self._in_batch or microbatch is None:
            return run()
        chunk = self._chunks[id(model)]
        mask = self.controller.mask(chunk.stage, microbatch)
        with chunk.masked(mask), self.controller.running(Action(chunk.stage, Kind.FORWARD, microbatch)):
            result = run()
        tag(result[0], (self, chunk, microbatch))
        return result

    def backward(self, run: Callable[[], Any], chunk: Chunk, microbatch: int) -> Any:
        """Run one microbatch's backward through one chunk, masked and timed."""
        mask = self.controller.mask(chunk.stage, microbatch)
        with chunk.masked(mask), self.controller.running(Action(chunk.stage, Kind.BACKWARD, microbatch)):
            result = run()
        chunk.gradients.report(mask.names)
        return result

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, and with it the end of ours."""
        if not self.controller.in_step:
            self._warn_unseen()
            return self._host_step(*args, **kwargs)
        with self._timed():
            self._holder.hold(self.controller.held_parameters(), self.controller.held_rows())
        try:
            result = self._host_step(*args, **kwargs)
        finally:
            self._holder.hold(())
        with self._timed():
            self.controller.end_step()
        return result

    # --- details ---------------------------------------------------------------------------------------------

    def _translate(self, num_microbatches: int) -> Any:
        return translate(self._collectives, self._position, self._model_config, self._pp_group, num_microbatches)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count our own time in Megatron's timers, where the model's config has them."""
        timers = self._model_config.timers
        if timers is not None:
            timers(TIMER, log_level=1).start()
        yield
        if timers is not None:
            timers(TIMER).stop()

    def _warn_unseen(self) -> None:
        if not self._batch_seen:
            self._batch_seen = True
            announce(
                self._collectives.rank,
                "the optimizer stepped, but no batch was seen: call get_forward_backward_func() after attach() or "
                "install(); until then nothing is frozen",
                logging.WARNING,
            )


def tag(output: Any, value: tuple[MegatronAdapter, Chunk, int]) -> None:
    """Remember on a forward's output what its backward will be: the host tells the backward nothing else.

    Several modules in one pipeline (0.17 on) put their outputs into dicts, which take no tag: their backwards then
    run unmasked, and the check of what was executed ends freezing before any mask is drawn.
    """
    tensor = output[0] if isinstance(output, list) else output
    if isinstance(tensor, torch.Tensor):
        setattr(tensor, _TAG, value)


def tagged(output: Any) -> tuple[MegatronAdapter, Chunk, int] | None:
    """What ``tag`` left on a forward's output; None where that forward was not ours."""
    tensor = output[0] if isinstance(output, list) else output
    return vars(tensor).get(_TAG) if isinstance(tensor, torch.Tensor) else None


def adapter_of(model: Any) -> MegatronAdapter | None:
    """The adapter attached to a model chunk, or to the first of a list of chunks."""
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    return vars(chunk).get(ATTRIBUTE) if isinstance(chunk, torch.nn.Module) else None


def _ties(collectives: ProcessGroupCollectives, parameters: Mapping[int, Mapping[str, Any]]) -> tuple[Tie, ...]:
    everywhere = {place for places in on_all_ranks(collectives, lambda: tied_places(parameters)) for place in places}
    return (tuple(sorted(everywhere)),) if len(everywhere) > 1 else ()
