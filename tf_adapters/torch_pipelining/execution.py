"""Run a batch in a plan's order, on torch's runtime for lists of actions.

The runtime splits backwards (I and W) and moves tensors as the order needs. Stages, loss and microbatches stay those
of the user's schedule object.
Source: torch/distributed/pipelining/schedules.py (``_PipelineScheduleRuntime``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import schedules as host

from tf_adapters.schedule.ir import PipelineSchedule


def runs_metadata_pass(schedule: Any) -> bool:
    """Return whether the next batch first runs the stages' modules to learn the shapes of their outputs.

    torch does so in the first batch, and in each batch that trains after one that evaluated.
    """
    name = "_stage{}_{}_initialized".format
    plural = "" if isinstance(schedule, host.PipelineScheduleSingle) else "s"
    return not all(getattr(schedule, name(plural, part), False) for part in ("forward", "backward"))


class RewrittenOrder:
    """Runs the batches of one schedule object in another order."""

    def __init__(self, schedule: Any, around_loss: Callable[..., None]) -> None:
        """``around_loss`` runs the schedule's ``_maybe_compute_loss``."""
        self._schedule, self._around_loss = schedule, around_loss
        self._single = isinstance(schedule, host.PipelineScheduleSingle)
        self._runtime: Any = None
        self._order: PipelineSchedule | None = None
        self._lowered: Any = None

    @property
    def keeps_sent(self) -> bool:
        """Return whether sent tensors stay to the end of a batch here and not in the schedule object's own loop.

        torch's runtime for lists of actions waits for all sends at the end.
        """
        return self._single

    def run(self, order: PipelineSchedule, *args: Any, **kwargs: Any) -> Any:
        """Run one batch in ``order``. The arguments are those of the schedule's ``_step_microbatches``.

        If torch cannot lower the order, it raises the same error on every rank, because each rank has the whole order.
        """
        if order is not self._order:
            self._lower(order)
        with self._running() as runtime:
            return type(runtime)._step_microbatches(runtime, *args, **kwargs)

    def _lower(self, order: PipelineSchedule) -> None:
        """Let torch add the actions that send, receive and reduce."""
        runtime = self._runtime = self._runtime or self._make_runtime()
        own = getattr(runtime, "pipeline_order_with_comms", None)
        lists: dict[int, list[host._Action | None]] = {
            rank: [host._Action.from_str(text) for text in texts] for rank, texts in enumerate(order.to_text())
        }
        try:
            runtime._prepare_schedule_with_comms(lists)
            self._lowered, self._order = runtime.pipeline_order_with_comms, order
        finally:
            runtime.pipeline_order_with_comms = own

    def _make_runtime(self) -> Any:
        """Return the schedule object, or a runtime for its stage if the object has another kind of loop."""
        schedule = self._schedule
        if not self._single:
            return schedule
        runtime: Any = host._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            [schedule._stage], schedule._n_microbatches, loss_fn=schedule._loss_fn, scale_grads=schedule.scale_grads
        )
        runtime._maybe_compute_loss = functools.partial(self._around_loss, runtime._maybe_compute_loss)
        return runtime

    @contextmanager
    def _running(self) -> Iterator[Any]:
        """Give the runtime the order and the schedule object's state; restore the object's order on exit."""
        schedule, runtime = self._schedule, self._runtime
        own = runtime.pipeline_order_with_comms
        runtime.pipeline_order_with_comms = self._lowered
        if self._single:
            runtime._loss_fn, runtime._has_backward = schedule._loss_fn, schedule._has_backward
            runtime._stages_forward_initialized = schedule._stage_forward_initialized
            runtime._stages_backward_initialized = schedule._stage_backward_initialized
        try:
            yield runtime
        finally:
            runtime.pipeline_order_with_comms = own
            if self._single:
                runtime._internal_losses.clear()
                schedule._stage_forward_initialized = runtime._stages_forward_initialized
                schedule._stage_backward_initialized = runtime._stages_backward_initialized
