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
from tf_adapters.megatron.chunks import Chunk, innermost
from tf_adapters.megatron.ddp import before_reduction
from tf_adapters.megatron.ordered import OrderedBatch, check_v
from tf_adapters.megatron.placement import is_in_v, position, v_forwards, v_order
from tf_adapters.megatron.tags import tag
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.messages import Receives, assumed_receives


class PlacedBatch:
    """Runs one batch in a V, with Megatron's own forward and backward steps and without deferral.

    Raises UnsupportedError if the model cannot run in a V, or the host's transfers cannot be skipped.
    """

    def __init__(self, batch: Batch) -> None:
        self._config = config = get_model_config(batch.model[0])
        check_v(config)
        groups = batch.pg_collection
        group = groups.pp if groups else parallel_state.get_pipeline_model_parallel_group()
        self._position = position(group, batch.model, config)
        self._trains = not batch.forward_only
        self._chunks = {
            id(wrapped): Chunk(stage, wrapped)
            for stage, wrapped in zip(self._position.stages, batch.model, strict=True)
        }
        order, receives = _order(self._position.size, batch.num_microbatches, self._trains)
        self._ordered = OrderedBatch(
            batch,
            order,
            tuple(self._chunks.values()),
            position=self._position,
            receives=receives,
            links=Links(group),
            run=lambda call, action: call(),
            compute=lambda action, last: None,
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


@functools.lru_cache
def _order(size: int, microbatches: int, trains: bool) -> tuple[PipelineSchedule, Receives]:
    """Return the order of a batch that trains or only evaluates, and when its ranks begin to receive."""
    order = v_order(size, microbatches) if trains else v_forwards(size, microbatches)
    return order, assumed_receives(order)


def needs_placing(batch: Batch) -> bool:
    """Return whether a batch's model is in a V."""
    models = batch.model
    if not (isinstance(models, list) and len(models) == 2):
        return False
    return is_in_v(getattr(innermost(models[0]), "config", None))
