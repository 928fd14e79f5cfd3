"""Run batches of a model in a V that no adapter runs: evaluations, and training without an attached adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_patches.forward_backward import Batch
from tf_adapters.hosts.links import Links
from tf_adapters.megatron.chunks import Chunk, device_of, innermost
from tf_adapters.megatron.ddp import before_reduction
from tf_adapters.megatron.ordered import OrderedBatch, check_replaceable, check_v, input_shape, reduces_early
from tf_adapters.megatron.placement import is_in_v, position, v_forwards, v_order
from tf_adapters.megatron.tags import tag
from tf_adapters.schedule.ir import Action
from tf_adapters.schedule.messages import assumed_receives


class PlacedBatch:
    """Runs one batch in a V, with Megatron's own forward and backward steps and without deferral.

    Raises UnsupportedError if the host's transfers cannot be skipped (``ordered.check_replaceable``).
    """

    def __init__(self, batch: Batch) -> None:
        self._config = config = get_model_config(batch.model[0])
        check_v(config)
        groups = batch.pg_collection
        group = groups.pp if groups else parallel_state.get_pipeline_model_parallel_group()
        check_replaceable(batch, group)
        self._position = position(group, batch.model, config)
        self._chunks = {
            id(wrapped): Chunk(stage, wrapped)
            for stage, wrapped in zip(self._position.stages, batch.model, strict=True)
        }
        self._by_stage = {chunk.stage: chunk for chunk in self._chunks.values()}
        self._last = batch.num_microbatches - 1
        self._trains = not batch.forward_only
        self._reduces_early = reduces_early(config, self._position)
        order = (v_order if self._trains else v_forwards)(self._position.size, batch.num_microbatches)
        self._ordered = OrderedBatch(
            batch,
            order,
            self._position.stages,
            receives=assumed_receives(order),
            links=Links(group),
            device=device_of(batch.model),
            run=self._run,
            compute=lambda action: None,
            input_shape=input_shape(batch, config),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the host's function of the batch inside. It gets stand-ins, and the V is run."""
        with ExitStack() as stack:
            stack.callback(self._ordered.close)
            if self._trains:
                stack.enter_context(before_reduction(self._config, self._finish))
            stack.enter_context(self._ordered.without_transfers())
            yield
            self._ordered.finish()

    def has(self, model: torch.nn.Module) -> bool:
        return id(model) in self._chunks

    def forward(self, run: functools.partial[Any], model: torch.nn.Module, microbatch: int) -> Any:
        """Answer the host's request for a forward."""
        chunk = self._chunks[id(model)]
        result = self._ordered.answer_forward(run, chunk.stage, microbatch)
        tag(result[0], (self, chunk, microbatch))
        return result

    def backward(self, run: Callable[[], Any], chunk: Chunk, microbatch: int) -> Any:
        """Answer the host's request for a backward."""
        return self._ordered.answer_backward(chunk.stage, microbatch)

    def _finish(self, chunk: int | None) -> None:
        self._ordered.finish(None if chunk is None else self._position.stage(chunk))

    def _run(self, call: Callable[[], Any], action: Action) -> Any:
        ready = self._reduces_early and action.microbatch == self._last
        if not self._trains:
            return call()
        with self._by_stage[action.stage].gradients.reported(ready):
            return call()


def needs_placing(batch: Batch) -> bool:
    """Return whether a batch's model is in a V."""
    models = batch.model
    if not (isinstance(models, list) and len(models) == 2):
        return False
    return is_in_v(getattr(innermost(models[0]), "config", None))
