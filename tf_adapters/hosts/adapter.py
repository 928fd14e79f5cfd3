"""The base class of all host adapters: it owns the controller, can undo every change, and saves a run's state."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from tf_adapters.advice.levers import goal_lines
from tf_adapters.collectives import Collectives, on_all_ranks
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.agreement import GivenConfig, agree_on_settings, gather_units
from tf_adapters.hosts.layers import blocks
from tf_adapters.overrides import Overrides
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.report.observer import MetricSink, RunReporter
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.messages import Receives, assumed_receives, receives_at
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline

StepHook = Callable[[torch.optim.Optimizer], None]

_PARTIAL = f"{SECTION}_of_another_rank"


class HostAdapter(ABC):
    """Runs a Controller inside one host object. Each host's adapter extends this class; the host's ``attach`` makes it.

    The constructor changes nothing in the host or the process; ``put_in`` does. A subclass sets attributes of host
    objects only through ``overrides``, and passes other undo functions to ``on_detach``. As a context manager it
    detaches on exit.

    Args:
        config: the settings, equal on all ranks.
        collectives: the group of all ranks that train together. The adapter closes it.
        describe: returns this rank's part of the pipeline; its ``units`` are those of this rank's stages. It changes
            nothing and must not communicate. An error on one rank is raised on all ranks.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
    """

    def __init__(
        self,
        config: TimelyFreezeConfig,
        collectives: Collectives,
        describe: Callable[[], HostPipeline],
        metrics: MetricSink | None = None,
    ) -> None:
        self.config, self.collectives, self._given_metrics = config, collectives, metrics
        self.overrides = Overrides()
        self._undo = ExitStack()  # undoes every change on this rank, then closes the collectives
        self._undo.callback(collectives.close)
        self._undo.callback(self.overrides.restore)
        self._detached = False
        self._receives: tuple[PipelineSchedule, FreezePlan | None, Receives] | None = None  # of the last step
        described: list[HostPipeline] = []
        made: list[Controller] = []

        def local_units() -> Mapping[int, Any]:
            described.append(describe())
            _check_scaled(config, described[0])
            return _units(config, described[0])

        units = gather_units(collectives, local_units)
        pipeline = replace(described[0], units=units)
        pipeline = replace(pipeline, ties=(*pipeline.ties, *self.ties(pipeline)))

        def make() -> None:
            made.append(Controller(config, pipeline, collectives, RunReporter(collectives, self.metrics(), goal_lines)))

        on_all_ranks(collectives, make)
        self.controller = made[0]

    def connect(self) -> None:  # noqa: B027
        """Make groups of our own besides the collectives, and nothing else: all ranks come here, or none."""

    @abstractmethod
    def install(self) -> None:
        """Install our hooks in the host. It must not communicate. An error on one rank is raised on all ranks."""

    def finish_step(self) -> None:  # noqa: B027
        """End the step that is open, if it is over and the host ends it later. Called on all ranks."""

    def put_in(self) -> None:
        """Change the host on all ranks. If one rank fails, no rank is changed and all raise the same error."""

        def install() -> None:
            for taps in self.controller.pipeline.taps.values():
                self.on_detach(taps.remove)
                taps.install()
            self.install()

        with self.abandoned_on_error():
            on_all_ranks(self.collectives, self.connect)
            on_all_ranks(self.collectives, install)

    def metrics(self) -> MetricSink | None:
        """Return the function that receives this rank's figures after each step, if any."""
        return self._given_metrics

    def ties(self, pipeline: HostPipeline) -> tuple[Any, ...]:
        """Return the tied weights that the host finds by comparing all stages' units. Called on all ranks."""
        return ()

    def receives(self, order: PipelineSchedule) -> Receives:
        """Return when ranks begin to receive in an ``order``, and which messages have arrived by then.

        Times come from the plan, if there is one. See ``schedule.messages``.
        """
        plan = self.controller.state.plan
        if self._receives is None or self._receives[:2] != (order, plan):
            if plan is not None and plan.start_ms.keys() >= set(order.actions):
                receives = receives_at(order, plan.start_ms, plan.duration_ms)
            else:
                receives = assumed_receives(order)
            self._receives = order, plan, receives
        return self._receives[2]

    def around_steps(self, optimizer: torch.optim.Optimizer, before: StepHook, after: StepHook) -> None:
        """Call ``before`` and ``after`` with the optimizer around each of its steps, until detached."""
        self.on_detach(optimizer.register_step_pre_hook(lambda given, *_: before(given)).remove)
        self.on_detach(optimizer.register_step_post_hook(lambda given, *_: after(given)).remove)

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the adapter is detached, in reverse order of registration."""
        self._undo.callback(undo)

    def detach(self) -> None:
        """Restore the host and write the last report. Call it on all ranks, between two steps.

        A second call does nothing. Raises UnsupportedError on all ranks, and changes nothing, if other code has wrapped
        our functions since attach.
        """
        if self._detached:
            return
        on_all_ranks(self.collectives, self.overrides.check)
        self._detached = True
        with self._undo:
            self.finish_step()
            self.controller.close()

    def abandon(self) -> None:
        """Restore the host on this rank, without a report or communication: every rank has the same error."""
        self._detached = True
        self._undo.close()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Abandon the adapter if the block raises. The error must reach all ranks."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def state_dict(self) -> dict[str, str]:
        """Return the state that a resumed run needs (the Stateful protocol of torch.distributed.checkpoint).

        The state is one text, because torch's package loads only keys that a fresh run has, too. If several ranks use
        one key, the package saves the value of an arbitrary rank. So if only rank 0's state is complete (see
        ``Controller.state_dict``), the other ranks use another key.
        """
        key = SECTION if self.controller.is_whole else _PARTIAL
        return {key: json.dumps(self.controller.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict()``; an empty one starts from the beginning. Call it on all ranks."""
        text = state_dict.get(SECTION, state_dict.get(_PARTIAL))
        try:
            state = None if text is None else json.loads(text)
        except (TypeError, ValueError):
            state = text  # all ranks go on to the broadcast, which takes rank 0's
        self.controller.load_state_dict(state)

    def __enter__(self) -> HostAdapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # after an error on this rank the others may not be here
            self.detach()

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a model, such as a moving average of its weights, has no adapter."""
        return


def _units(config: TimelyFreezeConfig, pipeline: HostPipeline) -> Mapping[int, Sequence[FreezeUnit]]:
    """Return a rank's units at the granularity of the settings. With tokens, units without a tap are never frozen."""

    def without_tap(unit: FreezeUnit, stage: int) -> FreezeUnit:
        return replace(unit, cap=0.0) if pipeline.taps[stage].names.isdisjoint(unit.names) else unit

    if config.samples_tokens:
        return {stage: tuple(without_tap(unit, stage) for unit in units) for stage, units in pipeline.units.items()}
    if config.freezes_blocks:
        return {stage: blocks(units, pipeline.layers[stage]) for stage, units in pipeline.units.items()}
    return pipeline.units


def _check_scaled(config: TimelyFreezeConfig, pipeline: HostPipeline) -> None:
    """Raise ConfigError if stages with different masks add up the gradient of one parameter, which cannot be scaled."""
    if config.gradient_scale == "skipped_as_zero":
        return
    stages: dict[int, int] = {}
    for stage, of_stage in pipeline.parameters.items():
        for name, parameter in of_stage.items():
            if parameter.requires_grad and stages.setdefault(id(parameter), stage) != stage:
                raise ConfigError(
                    f'{SECTION}.gradient_scale is "{config.gradient_scale}": allowed is "skipped_as_zero" here, since '
                    f"stages {stages[id(parameter)]} and {stage} of one rank share the parameter {name}"
                )


A = TypeVar("A", bound=HostAdapter)


def attach_once(
    connect: Callable[[], Collectives],
    host: HostInfo,
    existing: A | None,
    given: GivenConfig,
    check: Callable[[TimelyFreezeConfig], None],
    make: Callable[[Collectives, TimelyFreezeConfig], A],
    section: Callable[[], GivenConfig] = dict,
) -> A | None:
    """Return the adapter to use: the attached one, a new one, or None where freezing is not asked for.

    ``connect`` makes the collectives of all ranks that train together. ``given`` are the settings in the call. Without
    them, ``section`` returns the settings: all defaults, those of the host's own config, or None for no freezing. If
    freezing is enabled, ``check`` raises if the host cannot be frozen. Called on all ranks.

    Raises:
        ConfigError: the settings are wrong, differ between ranks, or differ from those of the attached adapter.
        UnsupportedError: freezing cannot be right with this host.
    """
    if existing is not None:
        on_all_ranks(existing.collectives, lambda: _check_same(existing.config, given))
        return existing

    def read() -> TimelyFreezeConfig | None:
        config = section() if given is None else given
        return None if config is None else TimelyFreezeConfig.parse(config)

    collectives = connect()
    with ExitStack() as undo:
        undo.callback(collectives.close)
        settings = agree_on_settings(collectives, host, read, check)
        if settings is None:
            return None
        adapter = make(collectives, settings)
        undo.pop_all()  # the adapter closes them
    adapter.put_in()
    adapter.controller.announce_start()
    return adapter


def _check_same(attached: TimelyFreezeConfig, given: GivenConfig) -> None:
    if given is not None and attached not in TimelyFreezeConfig.parse(given).fallbacks():
        raise ConfigError("timely_freeze is attached already, with other settings: detach() it first")
