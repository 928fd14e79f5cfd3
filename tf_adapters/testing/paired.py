"""Compare two trainings in the same processes, whose steps alternate, to measure the gain and cost of freezing.

A disturbance of the machine slows both trainings, so the ratio of a pair of steps is more reliable than a time. Every
function is called on all ranks at once.
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
"""One whole training step on this rank, with the optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class PairedSettings:
    """The settings of a training and the number of steps in each phase; ``settings`` override them.

    ``max_freeze_ratio`` None leaves it to the goal.
    """

    max_freeze_ratio: float | None = 0.8
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
        limit = {} if self.max_freeze_ratio is None else {"max_freeze_ratio": self.max_freeze_ratio}
        return {
            **limit,
            "warmup_steps": self.warmup,
            "monitoring_steps": self.monitoring,
            "progressive_steps": self.progressive,
            "on_error": "raise",
            "output_dir": self.output_dir,
            **self.settings,
        }


@dataclass
class Pairs:
    """Times in ms of alternating steps, one list for each phase."""

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
    """The result of a comparison: the times of both trainings, their held-out losses, and the plan."""

    pairs: Pairs
    held_out_alone: float
    held_out_attached: float
    planned_ratio: float
    mask_ms: float
    report: str


def timed_step(step: Step) -> float:
    """Run one step and return its time in ms, from all ranks ready to all ranks done."""
    _wait_for_all()
    start = time.perf_counter()
    step()
    _wait_for_all()
    return (time.perf_counter() - start) * 1e3


def in_rotation(steps: Mapping[_K, Step], number: int) -> dict[_K, float]:
    """Run one step of each training and return the times in ms. ``number`` chooses the first one."""
    names = list(steps)
    first = number % len(names)
    return {name: timed_step(steps[name]) for name in names[first:] + names[:first]}


def in_turn(alone: Step, attached: Step, phase_of: Callable[[], str], steps: int) -> Pairs:
    """Run ``steps`` pairs of steps of two trainings: of the host alone, and of one that freezes. The first alternates.

    ``phase_of`` returns the phase of the next step, such as ``controller.phase.value``.
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
    """Run pairs of steps as ``in_turn`` does, enough to get a plan. Then detach ``adapter`` from the second training.

    ``held_out`` returns the held-out losses of both, the host's alone first. It is called after the detach.
    """
    controller = adapter.controller

    def phase() -> str:
        return "control" if controller.state.is_control(controller.step) else controller.phase.value

    pairs = in_turn(alone, attached, phase, steps)
    mask_ms = time_masks(controller)
    adapter.detach()
    assert controller.forecast is not None
    return Outcome(pairs, *held_out(), controller.forecast.ratio, mask_ms, str(controller.report_path))


def on_and_off(step: Step, attach: Step, detach: Step, phase: str, pairs: int) -> Pairs:
    """Run pairs of steps of one training, with and without its adapter. It is attached before and after.

    This measures the cost of an adapter that does not freeze (yet), on the same model in the same memory. ``detach``
    also removes anything else that the host alone does not have. ``phase`` is the name of the pairs.
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
    """Return the time in ms to draw one step's masks on this rank and to switch them for every forward and backward.

    It is a mean over ``steps`` successive steps, so that no mask comes from a cache.
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
