"""The one loop that every host shares: warm up, monitor, plan, freeze progressively, freeze stably.

A host adapter translates its schedule, then calls ``begin_step``, wraps every action in ``running`` and calls
``end_step``. Everything that ranks must agree on happens in its second half, ``decide`` (``decisions``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tf_adapters.collectives import Collectives, on_one_rank
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import UnsupportedError
from tf_adapters.log import announce
from tf_adapters.measuring.layer_times import LayerTimer
from tf_adapters.measuring.memory import MemoryMeter
from tf_adapters.measuring.phase import LAYER_STEPS, Phase
from tf_adapters.measuring.timer import ActionTimer, NvtxTimer, clock_for, is_capturing
from tf_adapters.planner.forecast import Forecast
from tf_adapters.schedule.deferral import first_half
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.selection.masks import Mask, StageMasks
from tf_adapters.selection.sampling import whole_parameters
from tf_adapters.selection.stability import StabilityChecks
from tf_adapters.training import log_lines
from tf_adapters.training.batches import same_pipeline
from tf_adapters.training.decisions import Decisions
from tf_adapters.training.freeze_ratios import FreezeRatios
from tf_adapters.training.pipeline import HostPipeline
from tf_adapters.training.plan_maker import RunSetup
from tf_adapters.training.run_view import Observer, RunView
from tf_adapters.training.state import RunState, compatible_state, for_other_ranks
from tf_adapters.training.step_masks import MaskTally, Scale, StepMasks
from tf_adapters.training.tap_checks import TapChecks
from tf_adapters.training.tapped_actions import TappedActions
from tf_adapters.weight_gradients.activations import ActivationGraphs
from tf_adapters.weight_gradients.parameters import ParameterMask, any_compiled


class Controller:
    """Freezing for one training run on one rank; ``collectives`` are of all ranks that train together."""

    def __init__(
        self,
        config: TimelyFreezeConfig,
        pipeline: HostPipeline,
        collectives: Collectives,
        observer: Observer | None = None,
    ) -> None:
        self.config, self.pipeline = config, pipeline
        self.masks = StageMasks(
            pipeline.units, config.seed, config.freeze_exclude, caps=config.freeze_caps, tokens=config.samples_tokens
        )
        clock = pipeline.clock or clock_for(pipeline.device)
        timer = NvtxTimer if config.nvtx else ActionTimer
        self.timer, self._layers = timer(clock), LayerTimer(pipeline.layers, clock)
        self.memory = MemoryMeter(pipeline.device, pipeline.sent_bytes)
        self.state = RunState.fresh(config, pipeline.warmup_steps)
        self.state.turn_to(pipeline.schedule.validate())
        self.parameter_masks = {stage: ParameterMask(of_stage) for stage, of_stage in pipeline.parameters.items()}
        self.graphs = {stage: ActivationGraphs(model) for stage, model in pipeline.models.items()}
        self.stability_checks = StabilityChecks(
            config,
            self.masks.units,
            stages=pipeline.parameters,
            held=pipeline.held_values or whole_parameters(pipeline.parameters),
            collectives=collectives,
        )
        self._collectives, self._observer = collectives, observer
        self._ratios = FreezeRatios(config, self.schedule, self.masks)
        self._step_masks = StepMasks(
            lambda stage: self._ratios.masks(self.state, self.step, stage), pipeline.parameters, pipeline.ties
        )
        self._tally = MaskTally()
        self._executed: list[Action] = []
        self._ran_here = False  # whether the newest step ran in this process, since a state was loaded
        self._step_start: Any = None
        self.waits_for_update = False  # no update seems to come: until one does, the host computes everything
        self._setup = RunSetup(config, collectives, pipeline, self.masks, timer=self.timer, memory=self.memory)
        self._checks = TapChecks(pipeline.taps)
        self._tapped_actions = TappedActions(self._setup, self._checks)
        self._decisions = Decisions(self._setup, self.stability_checks, self._report)

    # --- what the host calls in every step -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that runs, or runs next: the paper's t, from 1."""
        return self.state.completed_steps + 1

    @property
    def phase(self) -> Phase:
        """The phase of this step. Without a plan, steps count as monitored until something is stable."""
        phase = self.state.phases.phase(self.step)
        waits = not self.config.plans and phase is Phase.STABLE and not any(self.state.stability.stable.values())
        return Phase.MONITORING_UPPER if waits else phase

    @property
    def _timed_phase(self) -> Phase:
        """The phase that this step's times count for: warm-up if it checks all taps, control if it runs as the host."""
        if self._checks.all:
            return Phase.WARMUP
        return Phase.CONTROL if self.state.runs_as_host(self.step) else self.phase

    @property
    def schedule(self) -> PipelineSchedule:
        return self.state.schedule

    @property
    def in_step(self) -> bool:
        return self._step_start is not None

    def begin_step(self, in_host_order: bool = False) -> None:
        """The host starts a training step, on request in its own order; equal on all ranks.

        Raises UnsupportedError where a graph captures it.
        """
        if is_capturing(self.pipeline.device):
            raise UnsupportedError(
                "timely_freeze cannot run here: a CUDA graph captures this step and would replay one mask for ever; "
                "train without CUDA graphs"
            )
        if self.config.splits_backwards and not self.state.failure and not self.state.left_to_host:
            self._checks.begin_step(self.step, self.phase, self.state.taps, waits=self.waits_for_update)
        self.state.begin_step(in_host_order, may_control=not self._checks.run and not self.config.saves_memory)
        self._ran_here = True
        self._executed.clear()
        self.memory.start_step()
        self._step_masks.clear()
        if self._times_layers():
            timed = {s: of for s, of in self.pipeline.layers.items() if not any_compiled(of.values())}
            self._layers.on(timed)
        self._checks.begin_batch()
        self.timer.drain()
        self._step_start = self.timer.start_step(self.state.microbatches)
        self._step_masks.draw()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Around an action's compute, without its communication: mask it and time it.

        Where weight gradients can wait, an INPUT_GRAD leaves them to ``compute_weight_gradients``; a BACKWARD computes
        them at its end.
        """
        mask, phase = self.mask(action.stage, action.microbatch), self._timed_phase
        self._executed.append(action)
        with (
            self.parameter_masks[action.stage].frozen(mask.names),
            self._graphs_kept(action, mask, phase),
            self.timer.timed(phase, action, mask.share),
            self._layers.timed(action),
            self._tapped(action),
        ):
            yield
        self.memory.look(phase, action)

    @contextmanager
    def around_loss(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around the loss of a microbatch where the host computes it apart from the forward.

        Masks and taps are those of the forward: the loss may take gradients through a checkpointed layer, which then
        runs again. The loss is not timed.
        """
        mask, action = self.mask(stage, microbatch), Action(stage, Kind.FORWARD, microbatch)
        graphs = self._graphs_kept(action, mask, Phase.STABLE)
        with self.parameter_masks[stage].frozen(mask.names), graphs, self._tapped(action):
            yield

    def compute_weight_gradients(self, stage: int, microbatch: int) -> None:
        """A WEIGHT_GRAD of ``execution``: compute what the INPUT_GRAD of the microbatch has left."""
        with self.running(Action(stage, Kind.WEIGHT_GRAD, microbatch)):
            pass

    @property
    def execution(self) -> PipelineSchedule:
        """Return the order of this step, equal on all ranks: the host's own, or the plan's."""
        return self.state.execution(self.step)

    def mask(self, stage: int, microbatch: int) -> Mask:
        """The mask of a microbatch on a stage in the current step."""
        return self._step_masks.of(stage, microbatch)

    def held_parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """This rank's parameters that every microbatch of the current step froze, on every stage that holds them.

        They take no update in this step: the host must leave them and their optimizer state as they are.
        """
        return self._step_masks.held_parameters()

    def gradient_scales(self) -> Mapping[int, Sequence[Scale]]:
        """Return the factors of the current step's gradients, by stage of this rank.

        They apply once, before gradients are clipped, to this stage's mean over all microbatches: for a tied weight,
        before the stages' gradients are added up. With ``gradient_scale`` "skipped_as_zero" there is no factor.
        """
        return self._step_masks.scales() if self.config.gradient_scale == "computed_mean" else {}

    def end_step(self) -> None:
        """The host has updated the weights on all ranks: ``close_step``, then ``decide``."""
        self.close_step()
        self.decide()

    def close_step(self) -> None:
        """The host has updated the weights on this rank. No message is sent."""
        step, phase = self.step, self.phase
        self.timer.stop_step(self._timed_phase, self._step_start, step)
        self.memory.stop_step(self._timed_phase)
        self._layers.off()  # a copy of the model that is made between two steps has no hooks of ours
        self._tally.add(step, phase, self._step_masks)
        self._step_start = None
        self.state.completed_steps = step
        if self._observer is not None:  # before decisions change the state that this step ran with
            self._observer.step_ended(self.view())
        self._checks.end_step(step)
        self.state.undecided = True

    def decide(self) -> None:
        """Decide what the next step does, after ``close_step``. Called on all ranks at the same point.

        Raises TimelyFreezeError on every rank if ``on_error`` is "raise" and anything of ours failed on one.
        """
        if not self.state.undecided:
            return
        self.state.undecided = False
        if self._checks.run:
            checks = self._checks
            self._decisions.check_taps(self.state, whole=checks.all, accumulates_early=checks.accumulates_early)
            checks.all = checks.again = False
        self._decisions.after_step(self.state, self._executed if self._ran_here else None)

    # --- what anybody may ask --------------------------------------------------------------------------------

    def frozen_parameters(self, step: int, stage: int, microbatch: int) -> tuple[str, ...]:
        """Names frozen on ``stage`` for ``microbatch`` at ``step``: the same on every replica and after a restart.

        The batch has as many microbatches as the one that runs, or ran last. If a tied weight is named, this stage's
        part of its gradient is skipped. The weight still learns from the parts of stages that do not name it.
        """
        masks = self._ratios.masks(self.state, step, stage)
        return masks[microbatch].names if microbatch < len(masks) else ()

    @property
    def forecast(self) -> Forecast | None:
        """Return the plan's promise for a whole step; None before there is a plan."""
        return self.state.forecast

    @property
    def freezable(self) -> Mapping[tuple[int, int], Action]:
        """The action that computes the weight gradients of a (stage, microbatch)."""
        return self._ratios.weight_gradients

    @property
    def report_path(self) -> Path:
        return self.config.report_path

    def view(self) -> RunView:
        return RunView(
            self._setup, self.state, ratios=self._ratios, layers=self._layers, tally=self._tally, checks=self._checks
        )

    def warn(self, text: str) -> None:
        """Log a warning and leave it in the report's notes. Called on all ranks."""
        self.state.note(text)
        announce(self._collectives.rank, text, logging.WARNING)

    def announce_start(self) -> None:
        """Log the line that says that the run is on, and what will happen when."""
        host = f"{self.pipeline.host.name} {self.pipeline.host.version}"
        self._decisions.say(log_lines.enabled(host, self.schedule, self.config, self.state.phases))
        if (line := log_lines.small(self.schedule, self.config)) is not None:
            self._decisions.say(line)

    # --- the run's life --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs, as plain JSON values.

        With APF and AutoFreeze save rank 0's: the others' lack what stability checks compare with (``is_whole``).
        """
        return self.state.to_json(self.config, self.masks, self.pipeline.plan_facts)

    @property
    def is_whole(self) -> bool:
        """Return whether this rank's ``state_dict`` is all that resuming needs."""
        return self._collectives.rank == 0 or not self.state.stability.begun

    def load_state_dict(self, data: Mapping[str, Any] | None, auto_warmup: int | None = None) -> None:
        """Resume. Called on all ranks; rank 0's data counts. A plan that does not fit this run is made anew.

        ``auto_warmup`` is what ``warmup_steps: "auto"`` stands for now; by default what the pipeline says.
        """
        warmup = self.pipeline.warmup_steps if auto_warmup is None else auto_warmup
        told = on_one_rank(self._collectives, lambda: for_other_ranks(data))
        chosen = data if self._collectives.rank == 0 else told
        self._step_start = None
        self._ran_here = False
        self._checks.forget()
        self.state = compatible_state(
            chosen,
            self.config,
            schedule=self.schedule,
            masks=self.masks,
            auto_warmup=warmup,
            host=self.pipeline.plan_facts,
        )
        self._forget_measured()
        phase = log_lines.phase(self.config, self.state, self.step)
        self._decisions.say(f"resumed after step {self.state.completed_steps}: {phase}")
        for note in self.state.notes if self.state.plan is None else ():
            self._decisions.say(note)
        self._decisions.resume_planning(self.state)

    def reschedule(self, schedule: PipelineSchedule) -> None:
        """The host runs another schedule from here on. Called on all ranks, between two steps.

        A schedule with another number of microbatches gets a plan of its own, made from the known times, soon after its
        first step. While monitoring, all numbers are monitored together. Another pipeline is monitored anew.
        """
        before = self.schedule
        self._ratios = FreezeRatios(self.config, schedule, self.masks)
        if same_pipeline(before, schedule) and before.num_microbatches != schedule.num_microbatches:
            self.state.turn_to(schedule)
            return
        schedule.validate()
        stability = self.state.stability
        self.state = self.state.restarted(self.config, "the pipeline schedule changed")
        self.state.turn_to(schedule)
        self.state.stability = stability  # of the same parameters
        self._forget_measured()
        again = f": monitoring again from step {self.step}" if self.config.plans else ""
        self._decisions.say(f"the pipeline schedule changed{again}")

    def close(self) -> None:
        """End of freezing on this rank. Called on all ranks at the same point: leaves the final report."""
        self._decisions.forget()
        self._layers.off()
        if self._observer is not None:
            self._observer.close(self.view())

    def _report(self) -> None:
        if self._observer is not None:
            self._observer.report(self.view())

    def _tapped(self, action: Action) -> AbstractContextManager[None]:
        """The part of an action between its mask and its host."""
        return self._tapped_actions.around(
            self.state,
            action,
            waits=self.waits_for_update,
            shares=lambda microbatch: self.mask(action.stage, microbatch).share,
            halfway=self._input_gradients_done,
        )

    def _input_gradients_done(self, action: Action) -> None:
        """Tell the meters of time, memory and layers that ``action`` computes only weight gradients from here on."""
        self.timer.input_gradients_done()
        if action.kind is Kind.BACKWARD:
            self.memory.look(self.phase, first_half(action))
            self._layers.weight_gradients()

    def _graphs_kept(self, action: Action, mask: Mask, phase: Phase) -> AbstractContextManager[None]:
        graphs = self.graphs.get(action.stage)
        if graphs is None or action.kind is Kind.WEIGHT_GRAD:
            return nullcontext()
        if mask.names:
            return graphs.kept(ends=mask.complete and action.stage == 0)
        return graphs.learned() if phase is Phase.WARMUP and action.kind is Kind.FORWARD else nullcontext()

    def _times_layers(self) -> bool:
        last = self.state.phases.warmup_end
        return self.phase is Phase.WARMUP and last - LAYER_STEPS < self.step <= last

    def _forget_measured(self) -> None:
        """Drop measurements, and a plan that is being made from them. They are of another run or schedule."""
        self._decisions.forget()
        self.timer.clear()
        self.memory.clear()
