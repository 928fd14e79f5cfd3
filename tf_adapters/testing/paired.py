"""Two trainings in the same processes, step by step in turn: what freezing gains and costs on a host of your own.

Whatever slows the machine down slows both, so the ratio of each pair of steps is worth more than any time. Everything
here is called on all ranks at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tf_adapters.training.controller import Controller

_K = TypeVar("_K")

Step = Callable[[], Any]
"""One whole training step on this rank, the optimizer's included."""


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """How a training freezes, and for how many steps in each phase; ``settings`` go over all of it."""

    max_freeze_ratio: float = 0.8
    warmup: int = 10
    monitoring: int = 60
    progressive: int = 10
    stable: int = 40
    output_dir: str = "runs/bench"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.warmup + self.monitoring + self.progressive + self.stable

    def section(self) -> dict[str, Any]:
        return {
            "max_freeze_ratio": self.max_freeze_ratio,
            "warmup_steps": self.warmup,
            "monitoring_steps": self.monitoring,
            "progressive_steps": self.progressive,
            "on_error": "raise",
            "output_dir": self.output_dir,
            **self.settings,
        }


@dataclass
class Pairs:
    """Times in ms of steps that ran in turn; one list for each phase."""

    alone: dict[str, list[float]] = field(default_factory=dict)
    attached: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, alone: float, attached: float) -> None:
        self.alone.setdefault(phase, []).append(alone)
        self.attached.setdefault(phase, []).append(attached)

    def ratio(self, phase: str) -> float:
        """Median over pairs of attached / alone."""
        pairs = zip(self.attached[phase], self.alone[phase], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclass
class Outcome:
    """What training twice showed: the times of both, their losses on text that neither saw, and the plan."""

    pairs: Pairs
    held_out_alone: float
    held_out_attached: float
    planned_ratio: float
    mask_ms: float
    report: str


def timed_step(step: Step) -> float:
    """One step, from all ranks ready to all ranks done; ms."""
    _wait_for_all()
    start = time.perf_counter()
    step()
    _wait_for_all()
    return (time.perf_counter() - start) * 1e3


def in_rotation(steps: Mapping[_K, Step], number: int) -> dict[_K, float]:
    """One step of each training, ms; which of them goes first changes with ``number``."""
    names = list(steps)
    first = number % len(names)
    return {name: timed_step(steps[name]) for name in names[first:] + names[:first]}


def in_turn(alone: Step, attached: Step, phase_of: Callable[[], str], steps: int) -> Pairs:
    """Run two trainings in turn, each for ``steps`` steps; which of them goes first alternates.

    Args:
        alone: a step of the host alone.
        attached: a step of a training that freezes.
        phase_of: the phase of the coming step, asked before each pair: ``lambda: controller.phase.value``.
        steps: pairs of steps to run.
    """
    pairs = Pairs()
    for number in range(steps):
        phase = phase_of()
        times = in_rotation({"attached": attached, "alone": alone}, number)
        pairs.add(phase, times["alone"], times["attached"])
    return pairs


def compare(
    alone: Step, attached: Step, adapter: Any, steps: int, held_out: Callable[[], tuple[float, float]]
) -> Outcome:
    """Run two trainings in turn, then take freezing off the second one.

    Args:
        alone: a step of the host alone.
        attached: a step of a training that freezes.
        adapter: what freezes it.
        steps: pairs of steps to run; the plan must be there before they are through.
        held_out: the losses of both on what neither has seen, the host's alone first; asked with freezing taken off.
    """
    controller = adapter.controller
    pairs = in_turn(alone, attached, lambda: controller.phase.value, steps)
    mask_ms = time_masks(controller)
    adapter.detach()
    assert controller.forecast is not None
    return Outcome(pairs, *held_out(), controller.forecast.ratio, mask_ms, str(controller.report_path))


def on_and_off(step: Step, attach: Step, detach: Step, phase: str, pairs: int) -> Pairs:
    """Run one training, attached as it comes and again at the end, in turn with and without its adapter.

    What an adapter costs that does not freeze (yet): neither another model nor other memory is in the comparison.

    Args:
        step: a training step.
        attach: attaches the training's adapter.
        detach: takes it off again, and whatever else the host alone would not have.
        phase: what to call the pairs.
        pairs: of steps to run.
    """
    result = Pairs()
    for number in range(pairs):
        before = timed_step(step) if number % 2 else None
        detach()
        alone = timed_step(step)
        attach()
        result.add(phase, alone, timed_step(step) if before is None else before)
    return result


def time_masks(controller: Controller, steps: int = 50) -> float:
    """Drawing one step's masks on this rank and switching them on and off for every forward and backward; ms.

    The mean over ``steps`` steps from the current one on, so that no mask comes out of a cache.
    """
    microbatches = range(controller.schedule.num_microbatches)
    start = time.perf_counter()
    for step in range(controller.step, controller.step + steps):
        for stage, parameters in controller.parameter_masks.items():
            for microbatch in microbatches:
                names = controller.frozen_parameters(step, stage, microbatch)
                for _ in ("forward", "backward"):
                    with parameters.frozen(names):
                        pass
    return (time.perf_counter() - start) * 1e3 / steps


def _wait_for_all() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
