"""A host's description, for the controller, of the pipeline that it runs and of this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.layer_times import Layers
from tf_adapters.measuring.timer import Clock
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.selection.freeze_units import FreezeUnit, Tie
from tf_adapters.selection.sampling import HeldValues
from tf_adapters.weight_gradients.taps import StageTaps

ParametersByStage = Mapping[int, Mapping[str, torch.nn.Parameter]]


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The framework that runs the pipeline, for the report and the log."""

    name: str
    version: str


@dataclass(frozen=True)
class HostPipeline:
    """A pipeline as a host runs it.

    Attributes:
        units: the freezable units of every stage of the pipeline, the same on every rank.
        parameters: this rank's stages, and the parameters of each by name; every name in their units is among them.
        models: this rank's modules by stage, as their forwards call them.
        held_values: this rank's values of a parameter, as its optimizer updates them; by default ``parameters``.
        taps: this rank's layers whose weight gradients can wait, by stage; the units say which they are.
        host_backwards: this rank's stages whose weight gradients must stay in the host's backward, and why.
        layers: this rank's layers by stage and name. The model could be cut between them.
        accumulating: a context in which weight gradients computed later go where the host's backward puts them.
        moves_forwards: whether the host can run forwards and input gradients in another order, too.
        sent_bytes: what a microbatch's forward or backward sends to other ranks, by stage and kind, if the host keeps
            it to the end of a batch in an order that is not its own. The host fills it in while it trains.
        microbatch_size: samples of a microbatch, as the host's settings have them; None where they do not say it.
        traced: whether transfers are measured on this rank's pipeline: true of one replica of the pipeline.
        meetings: the reasons why all ranks meet between two steps, as far as the host's settings show them.
        warmup_steps: the value of ``warmup_steps: "auto"``.
        clock: by default the clock of the device that the parameters live on.
    """

    host: HostInfo
    schedule: PipelineSchedule
    units: Mapping[int, Sequence[FreezeUnit]]
    parameters: ParametersByStage
    models: Mapping[int, torch.nn.Module] = field(default_factory=dict)
    ties: Sequence[Tie] = ()
    held_values: HeldValues | None = None
    taps: Mapping[int, StageTaps] = field(default_factory=dict)
    host_backwards: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[int, Layers] = field(default_factory=dict)
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext
    moves_forwards: bool = False
    sent_bytes: Mapping[tuple[int, Kind], int] = field(default_factory=dict)
    microbatch_size: int | None = None
    traced: bool = True
    meetings: Sequence[str] = ()
    warmup_steps: int = 0
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps!r}: allowed is an integer of at least 0")

    @property
    def plan_facts(self) -> dict[str, Any]:
        """Return the facts that a plan stands on and that are not in the settings, equal on all ranks, by name."""
        known = {} if self.microbatch_size is None else {"microbatch_size": self.microbatch_size}
        return {"moves_forwards": self.moves_forwards, **known}

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; the CPU where it has none."""
        devices = (parameter.device for of_stage in self.parameters.values() for parameter in of_stage.values())
        return next(devices, torch.device("cpu"))
