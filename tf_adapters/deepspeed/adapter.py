"""Freezing on DeepSpeed's pipeline engine, through the engine's own instruction map.

Only attributes of one engine instance are set, so ``detach()`` can remove them all.
Source: deepspeed/runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as host_checkpointing
from deepspeed.runtime.pipe import schedule as host
from torch.utils._pytree import tree_map_only

from tf_adapters.collectives import Collectives, holds_first_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.deepspeed.checkpoints import keep_in_checkpoints
from tf_adapters.deepspeed.execution import (
    InputGradients,
    OrderedBatch,
    OrderedSchedule,
    RunRow,
    VBatch,
    WeightGradients,
)
from tf_adapters.deepspeed.late_loss import LateLoss, loss_can_be_late, meetings
from tf_adapters.deepspeed.optimizers import (
    HeldParameters,
    accumulating,
    fill_missing_gradients,
    fill_missing_tied_gradients,
    held_values,
    scale_gradients,
)
from tf_adapters.deepspeed.schedules import SCHEDULES, MicrobatchTracker, own_schedule, translate
from tf_adapters.deepspeed.stages import (
    is_dualpipev,
    layers_by_stage,
    parameters_by_stage,
    stages_of,
    tied_names,
    units_by_stage,
)
from tf_adapters.deepspeed.support import refuse_another, refuse_compiled
from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.hosts.runner import RowRunner
from tf_adapters.hosts.waiting import WaitingWeights
from tf_adapters.measuring.timer import clock_for
from tf_adapters.overrides import Overrides
from tf_adapters.report.observer import MetricSink
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.schedule.orders import v_with_whole_backwards
from tf_adapters.selection.freeze_units import Tie, same_names
from tf_adapters.training.batches import MOST_NUMBERS
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS
from tf_adapters.training.pipeline import HostInfo, HostPipeline
from tf_adapters.weight_gradients.engine_taps import linear_layer
from tf_adapters.weight_gradients.taps import StageTaps

HOST = HostInfo("deepspeed", deepspeed.__version__)
ATTRIBUTE = "timely_freeze"  # of the engine: its adapter
_LOST_STEPS = 3
"""Steps in a row that could not run in a plan's order, after which a warning is logged."""
_WARMUP_ATTRIBUTES = ("warmup_num_steps", "num_warmup_steps", "warmup_steps")


class DeepSpeedAdapter(HostAdapter):
    """Runs a Controller inside one PipelineEngine. Made by ``tf_adapters.deepspeed.attach``."""

    def __init__(
        self,
        engine: Any,
        config: TimelyFreezeConfig,
        collectives: Collectives,
        metrics: MetricSink | None = None,
        warmup_steps: int | None = None,
    ) -> None:
        self.engine = engine
        self._tracker = MicrobatchTracker()
        self._losses: dict[int, Any] = {}
        self._running: tuple[int, int] | None = None
        self._waiting: WaitingWeights | None = None  # of the current batch, if only weight gradients move
        self._late_loss: LateLoss | None = None
        self._shapes_known = False
        self._lost_in_a_row, self._said_lost = 0, False  # steps that ran in the host's order to exchange shapes
        self._given_warmup = warmup_steps
        self._is_gpipe = config.schedule == "gpipe"  # our schedule: its transfers do not block either
        self._in_v = config.placement == "v"
        super().__init__(config, collectives, self._describe, metrics)

    def _describe(self) -> HostPipeline:
        engine, parameters = self.engine, parameters_by_stage(self.engine)
        self._stages = stages_of(engine)
        self._loss_is_late = self.config.defers and loss_can_be_late(engine)
        # The engine keeps only the loss of the last forward, which under GPipe belongs to another microbatch.
        self._keeps_losses = engine.is_last_stage() and not is_dualpipev(engine)
        self._own_schedule = own_schedule(engine)
        self._schedule_type = SCHEDULES.get(self.config.schedule) or self._own_schedule
        if self._in_v:
            self._orders = lru_cache(MOST_NUMBERS)(partial(v_with_whole_backwards, engine.num_stages))
        else:
            self._orders = lru_cache(MOST_NUMBERS)(partial(translate, self._schedule_type, stages=engine.num_stages))
        return HostPipeline(
            host=HOST,
            schedule=self._orders(engine.micro_batches),
            units=units_by_stage(engine, parameters),
            parameters=parameters,
            models=dict.fromkeys(parameters, engine.module),
            layers=layers_by_stage(engine),
            held_values=held_values(engine, parameters),
            taps=self._taps() if self.config.splits_backwards else {},
            accumulating=lambda: accumulating(engine),
            microbatch_size=int(engine.train_micro_batch_size_per_gpu()),
            moves_forwards=not engine.dynamic_shape,  # with dynamic shapes, receives cannot begin early
            traced=holds_first_rank(engine.grid.get_pipe_parallel_group()),
            meetings=meetings(engine, self._loss_is_late),
            warmup_steps=self._warmup_steps(),
            clock=clock_for(torch.device(engine.device)),
        )

    def _taps(self) -> dict[int, StageTaps]:
        """Return the taps of each stage. A layer of two stages is left to the host: its gradients would mix."""
        layer = partial(linear_layer, sampled=self.config.samples_tokens)
        if len(self._stages) == 1:
            return {self._stages[0]: StageTaps(self.engine.module, layer)}
        modules = {
            stage: {module for own in of_stage.values() for module in own.modules()}
            for stage, of_stage in layers_by_stage(self.engine).items()
        }
        shared = set.intersection(*modules.values())

        def of_stage(own: WeakSet[torch.nn.Module], module: torch.nn.Module) -> Any:
            return layer(module) if module in own else None

        # Weak: the taps of a run that failed keep no layer alive.
        own_layers = {stage: WeakSet(own - shared) for stage, own in modules.items()}
        return {stage: StageTaps(self.engine.module, partial(of_stage, own)) for stage, own in own_layers.items()}

    def ties(self, pipeline: HostPipeline) -> tuple[Tie, ...]:
        """Return tied weights. Stages share their names, but also the names of a tied module's other weights."""
        tied = tied_names(self.engine, pipeline.parameters)
        return tuple(tie for tie in same_names(pipeline.units) if tie[0][1] in tied)

    def _warmup_steps(self) -> int:
        """Return the remaining learning-rate warm-up in steps; a few steps if the scheduler has no warm-up."""
        if self._given_warmup is not None:
            return self._given_warmup
        lengths = (getattr(self.engine.lr_scheduler, name, None) for name in _WARMUP_ATTRIBUTES)
        length = next((length for length in lengths if isinstance(length, int)), None)
        return DEFAULT_WARMUP_STEPS if length is None else max(0, length - int(self.engine.global_steps))

    def metrics(self) -> MetricSink | None:
        """Send figures to the user's function, and on rank 0 to the engine's monitor."""
        engine, given = self.engine, self._given_metrics
        if not engine.monitor.enabled or torch.distributed.get_rank() > 0:
            return given

        def write(figures: Mapping[str, float]) -> None:
            samples = engine.global_samples
            events = [(f"TimelyFreeze/{name}", value, samples) for name, value in figures.items()]
            try:
                engine.monitor.write_events(events)
            finally:  # the user's function gets its figures even if the monitor fails
                if given is not None:
                    given(figures)

        return write

    # --- on and off ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self._loss_is_late:
            self._late_loss = LateLoss(self.engine)
            self.on_detach(self._late_loss.close)

    def install(self) -> None:
        """Replace instructions of the engine by ours, which call the engine's."""
        engine, overrides, controller = self.engine, self.overrides, self.controller
        self._holder = HeldParameters(engine)
        self._host_instructions: dict[type, Callable[..., None]] = dict(engine._INSTRUCTION_MAP)
        self.on_detach(self._holder.after_step)  # after a step that was cut off
        self.around_steps(engine.basic_optimizer, self._holder.before_step, self._holder.after_step)
        wrapped = {
            host.ForwardPass: self._forward,
            host.BackwardPass: partial(self._backward, Kind.BACKWARD),
            host.ReduceTiedGrads: self._reduce_tied_gradients,
            host.ReduceGrads: self._reduce_gradients,
            host.OptimizerStep: self._optimizer_step,
        }
        if self.config.defers or self._is_gpipe or self._in_v:
            wrapped |= {
                InputGradients: partial(self._backward, Kind.INPUT_GRAD),
                WeightGradients: lambda _, stage, microbatch: controller.compute_weight_gradients(stage, microbatch),
                RunRow: lambda _, runner: runner.finish(),
                **{kind: partial(self._receive, kind) for kind in (host.RecvActivation, host.RecvGrad)},
            }
            overrides.wrap(engine, "reset_activation_shape", self._reset_activation_shape)
        if self._late_loss is not None:
            overrides.set(engine, "_aggregate_total_loss", self._late_loss.aggregate)
        overrides.set(engine, "_INSTRUCTION_MAP", {**self._host_instructions, **wrapped})
        overrides.wrap(engine, "_exec_schedule", self._exec_schedule)
        keep_in_checkpoints(self, engine, self._warmup_steps)
        overrides.set(engine, ATTRIBUTE, self)
        if engine.module.activation_checkpoint_func is not host_checkpointing.non_reentrant_checkpoint:
            overrides.wrap(engine.module, "activation_checkpoint_func", self._checkpoint)

    # --- instructions ----------------------------------------------------------------------------------------

    def _exec_schedule(self, run: Callable[[host.PipeSchedule], None], schedule: host.PipeSchedule) -> None:
        evaluates = isinstance(schedule, host.InferenceSchedule) or getattr(schedule, "forward_only", False)
        if evaluates:  # the second is DualPipeV's
            with Overrides() as overrides:
                # DualPipeV's engine counts buffers by the microbatches of training: with another number in an
                # evaluation it fails, also without us (0.19.8).
                if is_dualpipev(self.engine):
                    overrides.set(self.engine, "micro_batches", schedule.micro_batches)
                run(schedule)
            return
        refuse_another(schedule, self._own_schedule)
        try:
            run(self._begin_step())
        finally:
            self._waiting = None
        self._shapes_known = True

    def _begin_step(self) -> host.PipeSchedule:
        """Start a training step, and return the schedule that the engine runs in it."""
        engine, controller = self.engine, self.controller
        refuse_compiled(engine, self.config)  # it may have been compiled after attaching
        if engine.micro_batches != controller.state.microbatches:
            controller.reschedule(self._orders(engine.micro_batches))
        self._tracker = MicrobatchTracker()
        self._losses.clear()
        in_host_order = not self._shapes_known and controller.pipeline.moves_forwards and not self._in_v
        self._count_lost(in_host_order and controller.execution is not controller.schedule)
        controller.begin_step(in_host_order)
        size = {"micro_batches": engine.micro_batches, "stages": engine.num_stages, "stage_id": engine.stage_id}
        order = controller.execution
        rewritten = order is not controller.schedule
        may_move = self._shapes_known and controller.pipeline.moves_forwards
        if self._in_v or ((rewritten or self._is_gpipe) and may_move):
            batch = (VBatch if self._in_v else OrderedBatch)(engine, order)
            runner = RowRunner(order, self.receives(order), engine.stage_id, host=batch)
            return OrderedSchedule(runner, batch.num_buffers, **size)
        if rewritten:
            row = order.ranks[engine.stage_id]
            self._waiting = WaitingWeights(row, lambda a, _: controller.compute_weight_gradients(a.stage, a.microbatch))
        return self._schedule_type(**size)

    def _count_lost(self, lost: bool) -> None:
        """Warn once if several steps in a row cannot run in the plan's order. The count is the same on all ranks."""
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        if self._lost_in_a_row != _LOST_STEPS or self._said_lost:
            return
        self._said_lost = True
        self.controller.warn(
            "no weight gradient is deferred: engine.reset_activation_shape() is called before each batch, which then "
            "runs in the engine's own order to exchange shapes; call it only where shapes change, or build the "
            "PipelineModule with dynamic_shape=True"
        )

    def _forward(self, engine: Any, buffer_id: int, **kwargs: Any) -> None:
        run = self._host_instructions[host.ForwardPass]
        if not self._trains():
            run(engine, buffer_id, **kwargs)
            return
        phase = kwargs.get("phase", 0)
        self._compute_waiting()
        stage, microbatch = self._stages[phase], self._tracker.forward(buffer_id, phase)
        with self._action(stage, Kind.FORWARD, microbatch):
            run(engine, buffer_id, **kwargs)
        mask = self.controller.mask(stage, microbatch)
        if mask.names and not (stage == 0 and mask.complete):
            # The engine runs a backward of each output.
            outputs, graphs = engine.pipe_buffers["outputs"], self.controller.graphs[stage]
            outputs[buffer_id] = tree_map_only(torch.Tensor, graphs.required, outputs[buffer_id])
        if self._keeps_losses:
            self._losses[buffer_id] = engine.loss

    def _backward(self, kind: Kind, engine: Any, buffer_id: int, **kwargs: Any) -> None:
        stage, microbatch = self._stages[kwargs.get("phase", 0)], self._tracker.backward(buffer_id)
        if self._keeps_losses:
            engine.loss = self._losses.pop(buffer_id)
        self._compute_waiting()
        if self._waiting is not None:
            kind = self._waiting.backward_kind(stage, microbatch)
        with self._action(stage, kind, microbatch):
            if stage == 0 and self.controller.mask(stage, microbatch).complete:
                self._skip_backward(buffer_id)
            else:
                self._host_instructions[host.BackwardPass](engine, buffer_id, **kwargs)

    def _receive(self, kind: type, engine: Any, *args: Any, **kwargs: Any) -> None:
        self._compute_waiting()
        self._host_instructions[kind](engine, *args, **kwargs)

    def _reset_activation_shape(self, run: Callable[[], None]) -> None:
        """After a reset of shapes, on all ranks, run the next batch in the engine's order, which exchanges shapes."""
        self._shapes_known = False
        run()

    @contextmanager
    def _action(self, stage: int, kind: Kind, microbatch: int) -> Iterator[None]:
        self._running = (stage, microbatch)
        action = Action(stage, kind, microbatch)
        with self.controller.running(action):
            yield
        if self._waiting is not None:
            self._waiting.passed(action)

    def _compute_waiting(self) -> None:
        """Compute the weight gradients that are next in the row.

        It is called before a receive, while the rank would wait. It is not called right after a backward, so that the
        result of the backward is sent first.
        """
        if self._waiting is not None:
            self._waiting.run()

    def _skip_backward(self, buffer_id: int) -> None:
        """Free the tensors that the host's backward would free: the first stage needs no gradient."""
        buffers = self.engine.pipe_buffers
        buffers["output_tensors"][buffer_id] = buffers["outputs"][buffer_id] = None
        if is_dualpipev(self.engine):
            buffers["inputs"][buffer_id] = buffers["grads"][buffer_id] = None

    def _reduce_tied_gradients(self, engine: Any, **kwargs: Any) -> None:
        self._compute_waiting()
        for scales in self.controller.gradient_scales().values():
            scale_gradients(engine.optimizer, scales)
        fill_missing_tied_gradients(engine)
        self._host_instructions[host.ReduceTiedGrads](engine, **kwargs)

    def _reduce_gradients(self, engine: Any, **kwargs: Any) -> None:
        self._compute_waiting()
        held = self.controller.held_parameters()
        fill_missing_gradients(engine.optimizer, held)
        self._holder.held = held
        self._host_instructions[host.ReduceGrads](engine, **kwargs)

    def _optimizer_step(self, engine: Any, **kwargs: Any) -> None:
        try:
            self._host_instructions[host.OptimizerStep](engine, **kwargs)
        finally:
            self._holder.held = ()
        self.controller.end_step()

    def _trains(self) -> bool:
        """Return whether this forward is part of training: evaluation runs the instruction without gradients."""
        return self.controller.in_step and torch.is_grad_enabled()

    # --- activation checkpointing ----------------------------------------------------------------------------

    def _checkpoint(self, run: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
        """Make the input of a checkpointed segment require gradients.

        Reentrant checkpointing computes gradients only if a segment's input requires one. After a frozen first layer it
        does not, and the stage would silently lose its gradients.
        """
        if self._trains() and self._running and not self.controller.mask(*self._running).complete:
            for tensor in inputs:
                if torch.is_tensor(tensor) and tensor.is_floating_point() and not tensor.requires_grad:
                    tensor.requires_grad_()
        return run(function, *inputs)
