"""What every host's adapter shares: one controller, a way back, the state of a run."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from tf_adapters.collectives import Collectives, on_all_ranks
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.agreement import GivenConfig, agree_on_settings, gather_units
from tf_adapters.hosts.layers import blocks
from tf_adapters.overrides import Overrides
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.report.observer import MetricSink, RunReporter
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.schedule.messages import Receives, messages_taken, receive_points
from tf_adapters.selection.units import FreezeUnit
from tf_adapters.training.controller import Controller
from tf_adapters.training.pipeline import HostInfo, HostPipeline

__all__ = ["HostAdapter", "attach_once", "is_adaptive"]

StepHook = Callable[[torch.optim.Optimizer], None]

_PARTIAL = f"{SECTION}_of_another_rank"


class HostAdapter(ABC):
    """Runs a Controller inside one host object. A host's adapter extends it; ``attach`` of the host makes it.

    Making one changes nothing in the host or the process; ``put_in`` does. A subclass sets attributes of host objects
    through ``overrides`` only, and gives ``on_detach`` what else is to be taken back. As a context manager it detaches
    on leaving.

    Args:
        config: the settings, equal on all ranks.
        collectives: the group of all ranks that train together. The adapter closes it.
        describe: this rank's part of the pipeline; ``units`` are those of its own stages. What it raises on one rank
            is raised on all of them. It changes nothing, and must not communicate.
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
        self._undo = ExitStack()  # what takes everything back on this rank, and closes the collectives last
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
            made.append(Controller(config, pipeline, collectives, RunReporter(collectives, self.metrics())))

        on_all_ranks(collectives, make)
        self.controller = made[0]

    @abstractmethod
    def install(self) -> None:
        """Take our place in the host. What it raises on one rank is raised on all of them. It must not communicate."""

    def put_in(self) -> None:
        """Change the host, on all ranks or, where one fails, on none; then all raise the same error."""

        def install() -> None:
            for taps in self.controller.pipeline.taps.values():
                self.on_detach(taps.remove)
                taps.install()
            self.install()

        with self.abandoned_on_error():
            on_all_ranks(self.collectives, install)

    def metrics(self) -> MetricSink | None:
        """What takes this rank's figures."""
        return self._given_metrics

    def ties(self, pipeline: HostPipeline) -> tuple[Any, ...]:
        """Weights that several stages hold, told from all stages' units. Called on all ranks."""
        return ()

    def receives(self, order: PipelineSchedule) -> Receives:
        """When ranks begin to receive in an ``order``, and what then has arrived elsewhere (``schedule.messages``).

        By the plan's times; those of an order without a plan are a forward's 1 and a backward's 2.
        """
        plan = self.controller.state.plan
        if self._receives is None or self._receives[:2] != (order, plan):
            if plan is not None and plan.start_ms.keys() >= set(order.actions):
                starts, ms = plan.start_ms, plan.duration_ms
            else:
                ms = {action: 1.0 if action.kind is Kind.FORWARD else 2.0 for action in order.actions}
                starts = PipelineDag.from_schedule(order).start_times(ms)
            ends = {action: starts[action] + ms[action] for action in order.actions}
            self._receives = order, plan, Receives(receive_points(order, ends), messages_taken(order))
        return self._receives[2]

    def around_steps(self, optimizer: torch.optim.Optimizer, before: StepHook, after: StepHook) -> None:
        """Call ``before`` and ``after`` with the optimizer around each of its steps, until detached."""
        self.on_detach(optimizer.register_step_pre_hook(lambda given, *_: before(given)).remove)
        self.on_detach(optimizer.register_step_post_hook(lambda given, *_: after(given)).remove)

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the adapter is detached; the last one first."""
        self._undo.callback(undo)

    def detach(self) -> None:
        """Give the host back as it was, and leave the last report. Call it on all ranks, between two steps.

        A second call does nothing. Raises UnsupportedError, on all ranks and with nothing taken back, where other code
        has wrapped ours since.
        """
        if self._detached:
            return
        on_all_ranks(self.collectives, self.overrides.check)
        self._detached = True
        with self._undo:
            self.controller.close()

    def abandon(self) -> None:
        """Give the host back on this rank, without a report and without the other ranks: an error has reached all."""
        self._detached = True
        self._undo.close()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Around what belongs to attaching: an error, which must reach all ranks, leaves nothing attached."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def state_dict(self) -> dict[str, str]:
        """What resuming needs: the Stateful protocol of torch.distributed.checkpoint.

        One text, because that package loads only the keys that a fresh run has too. Of a key that several ranks have it
        saves any rank's value, so where only rank 0's is whole (see ``Controller.state_dict``) others have another key.
        """
        key = SECTION if self.controller.is_whole else _PARTIAL
        return {key: json.dumps(self.controller.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict()``; an empty one starts from the beginning. Call it on all ranks."""
        text = state_dict.get(SECTION, state_dict.get(_PARTIAL))
        try:
            state = None if text is None else json.loads(text)
        except (TypeError, ValueError):
            state = text  # all ranks go on to the broadcast, where rank 0's counts
        self.controller.load_state_dict(state)

    def __enter__(self) -> HostAdapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # after an error on one rank the others may be anywhere
            self.detach()

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a model (a moving average of its weights, say) is not attached to anything."""
        return


def _units(config: TimelyFreezeConfig, pipeline: HostPipeline) -> Mapping[int, Sequence[FreezeUnit]]:
    """A rank's units at the granularity of the settings; never frozen where no tap can sample a layer's tokens."""

    def without_tap(unit: FreezeUnit, stage: int) -> FreezeUnit:
        return replace(unit, cap=0.0) if pipeline.taps[stage].names.isdisjoint(unit.names) else unit

    if config.samples_tokens:
        return {stage: tuple(without_tap(unit, stage) for unit in units) for stage, units in pipeline.units.items()}
    if config.freezes_blocks:
        return {stage: blocks(units, pipeline.layers[stage]) for stage, units in pipeline.units.items()}
    return pipeline.units


def _check_scaled(config: TimelyFreezeConfig, pipeline: HostPipeline) -> None:
    """Raise ConfigError where a parameter's gradient is a sum over stages that computed different microbatches."""
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


def is_adaptive(optimizers: Iterable[Any]) -> bool:
    """Whether these optimizers divide by the size of the gradient: those with ``betas`` do, as Adam and its kin."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    return bool(groups) and all("betas" in group for group in groups)


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

    ``connect`` makes the collectives of all ranks that train together; ``given`` are the settings in the call, if any,
    else ``section`` gives them: all defaults, or those of the host's own config, None without any. Where they are
    enabled, ``check`` raises if the host cannot be frozen. Called on all ranks.

    Raises:
        ConfigError: the settings are wrong, differ between ranks, or differ from those of the attached adapter.
        UnsupportedError: freezing cannot be right with this host.
    """
    if existing is not None:
        on_all_ranks(existing.collectives, lambda: _check_same(existing.config, given))
        return existing

    def read() -> TimelyFreezeConfig | None:
        config = section() if given is None else given
        settings = None if config is None else TimelyFreezeConfig.parse(config)
        if settings is not None and settings.enabled:
            check(settings)
        return settings

    collectives = connect()
    with ExitStack() as undo:
        undo.callback(collectives.close)
        settings = agree_on_settings(collectives, host, read)
        if settings is None:
            return None
        adapter = make(collectives, settings)
        undo.pop_all()  # the adapter closes them
    adapter.put_in()
    adapter.controller.announce_start()
    return adapter


def _check_same(attached: TimelyFreezeConfig, given: GivenConfig) -> None:
    if given is not None and TimelyFreezeConfig.parse(given) != attached:
        raise ConfigError("timely_freeze is attached already, with other settings: detach() it first")
