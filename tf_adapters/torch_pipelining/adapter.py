"""Freezing on torch.distributed.pipelining, through the stages' own forward and backward of one microbatch.

Only attributes of this rank's stage objects and of the schedule object are set, and hooks on the optimizers, so
``detach()`` takes them off again and nothing remains.
Source: torch/distributed/pipelining/schedules.py and stage.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tf_adapters.collectives import ProcessGroupCollectives, holds_first_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.masking.rows import with_rows
from tf_adapters.overrides import Overrides
from tf_adapters.report.observer import MetricSink
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.timing.timer import clock_for
from tf_adapters.torch_pipelining.optimizers import Updates
from tf_adapters.torch_pipelining.replicas import frozen_replica, report_to_reducer
from tf_adapters.torch_pipelining.rows import row_mask
from tf_adapters.torch_pipelining.schedules import stages_of, translate
from tf_adapters.torch_pipelining.units import held_values, shared_parameters, units_of
from tf_adapters.training.agreement import gather_units
from tf_adapters.training.controller import Controller, HostInfo
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS

ATTRIBUTE = "timely_freeze"  # of the schedule: its adapter
STATE_KEY = "timely_freeze"


class TorchPipeliningAdapter:
    """Runs a Controller inside one schedule object. Made by ``tf_adapters.torch_pipelining.attach``.

    Masks hold inside ``forward_one_chunk`` and the two backwards of a stage, never around the first step's metadata
    pass, which keeps what it sees of ``requires_grad``. The last stage's loss is computed between its forward and its
    backward, outside of both: its time is part of the measured rest of the step.
    """

    def __init__(
        self,
        schedule: Any,
        config: TimelyFreezeConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        metrics: MetricSink | None = None,
    ) -> None:
        self.schedule = schedule
        self._stages = stages_of(schedule)
        self._training = False
        self._gone_backward: set[int] = set()  # stages that have run a backward in this batch
        parameters = {stage.stage_index: dict(stage.submod.named_parameters()) for stage in self._stages}
        by_rows = self._stages if config.granularity == "row" else ()
        self._row_masks = {stage.stage_index: row_mask(stage.submod) for stage in by_rows}
        units = with_rows({stage.stage_index: units_of(stage.submod) for stage in self._stages}, self._row_masks)
        collectives = ProcessGroupCollectives()
        self.controller = Controller(
            config=config,
            schedule=translate(schedule),
            units=gather_units(collectives, units),
            parameters=parameters,
            ties=shared_parameters(parameters),
            collectives=collectives,
            clock=clock_for(torch.device(self._stages[0].device)),
            host=HostInfo("torch.distributed.pipelining", torch.__version__),
            auto_warmup=DEFAULT_WARMUP_STEPS,
            metrics=metrics,
            held_values=held_values(parameters),
            traced=holds_first_rank(self._stages[0].group),
            row_masks=self._row_masks,
        )
        self._updates = Updates(optimizers, self.controller) if optimizers else None
        self._overrides = Overrides()
        self._install()

    # --- on and off ------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give the schedule and its stages back as they were. Call it on all ranks, between two steps."""
        self._overrides.restore()
        if self._updates is not None:
            self._updates.remove()
        for mask in self._row_masks.values():
            mask.remove()
        self.controller.close()

    def _install(self) -> None:
        overrides = self._overrides
        overrides.set(self.schedule, "step", self._stepping(self.schedule.step))
        overrides.set(self.schedule, ATTRIBUTE, self)
        for stage in self._stages:
            overrides.set(stage, "forward_one_chunk", self._forward(stage))
            overrides.set(stage, "backward_one_chunk", self._backward(stage))
            overrides.set(stage, "backward_weight_one_chunk", self._weight_gradients(stage))

    # --- checkpoints of the run ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, str]:
        """What resuming needs, the same on every rank: the Stateful protocol of torch.distributed.checkpoint.

        One text, because that package loads only the keys that a fresh run has too.
        """
        return {STATE_KEY: json.dumps(self.controller.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict()``; an empty one starts from the beginning. Call it on all ranks."""
        text = state_dict.get(STATE_KEY)
        self.controller.load_state_dict(None if text is None else json.loads(text), DEFAULT_WARMUP_STEPS)

    # --- the host's step -------------------------------------------------------------------------------------

    def _stepping(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self.schedule._has_backward:  # eval() runs step() too
                return run(*args, **kwargs)
            # Several batches may accumulate gradients for one update. All of them take the step's masks; what was
            # executed and how long the step took is said of the last.
            self.controller.begin_step()
            self._training = True
            self._gone_backward.clear()
            try:
                result = run(*args, **kwargs)
            finally:
                self._training = False
            if self._updates is None:
                self.controller.end_step()
            return result

        return step

    # --- a stage's computations ------------------------------------------------------------------------------

    def _forward(self, stage: Any) -> Callable[..., Any]:
        run = stage.forward_one_chunk

        @functools.wraps(run)
        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with self._action(stage, Kind.FORWARD, fwd_chunk_id):
                return run(fwd_chunk_id, *args, **kwargs)

        return forward_one_chunk

    def _backward(self, stage: Any) -> Callable[..., None]:
        run = stage.backward_one_chunk

        @functools.wraps(run)
        def backward_one_chunk(
            bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            with self._action(stage, Kind.BACKWARD if full_backward else Kind.INPUT_GRAD, bwd_chunk_id):
                run(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
            if self._training:
                first = stage.stage_index not in self._gone_backward
                self._gone_backward.add(stage.stage_index)
                if first or last_backward:
                    report_to_reducer(stage.submod, self.controller.mask(stage.stage_index, bwd_chunk_id).names)

        return backward_one_chunk

    def _weight_gradients(self, stage: Any) -> Callable[..., None]:
        run = stage.backward_weight_one_chunk

        @functools.wraps(run)
        def backward_weight_one_chunk(bwd_chunk_id: int, last_backward: bool = False) -> None:
            with self._action(stage, Kind.WEIGHT_GRAD, bwd_chunk_id):
                run(bwd_chunk_id, last_backward=last_backward)

        return backward_weight_one_chunk

    @contextmanager
    def _action(self, stage: Any, kind: Kind, microbatch: int) -> Iterator[None]:
        """Around one computation of a training batch: its mask and its time. Evaluation runs without."""
        if not self._training:
            yield
            return
        frozen = self.controller.mask(stage.stage_index, microbatch).names
        action = Action(stage.stage_index, kind, microbatch)
        with self.controller.running(action), frozen_replica(stage.submod, frozen):
            yield
