"""Where to cut a list of layers into pipeline stages: by parameters, by memory or by measured time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from costs import LayerCost
from deepspeed.pipe import PipelineModule

HEURISTICS = ("parameters", "memory", "time")
FP32_STATE_BYTES = 4 + 4 + 4 + 4  # of a parameter: itself, its gradient, Adam's two moments
BF16_STATE_BYTES = 2 + 4 + 4 + 4 + 4  # the same beside a bf16 copy

StageCost = Callable[[int, int, int], float]
"""Cost of a stage, by its index and its layers: start inclusive, stop exclusive."""


def split(cost: StageCost, layers: int, stages: int) -> list[int]:
    """The boundaries of contiguous stages whose largest cost is the least possible; layers 0, ..., `layers`.

    No stage is empty. Among equally good ones it takes an even one. DeepSpeed's `partition_balanced` does
    something else: it minimises the largest cost minus the smallest, and from 3 stages on its largest can be larger.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers do not fill {stages} stages")
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        following = {}
        for stop in range(stage + 1, layers + 1):
            ways = []
            for start, (largest, squares, boundaries) in best.items():
                if start < stop:
                    own = cost(stage, start, stop)
                    ways.append((max(largest, own), squares + own**2, (*boundaries, stop)))
            following[stop] = min(ways)
        best = following
    return list(best[layers][2])


@dataclass(frozen=True)
class Stages:
    """The layers' costs, and what it takes to turn them into a stage's.

    `in_flight[s]` is how many microbatches' activations stage s keeps at once.
    """

    layers: Sequence[LayerCost]
    in_flight: Sequence[int]
    state_bytes: int = FP32_STATE_BYTES

    def boundaries(self, heuristic: str) -> list[int]:
        costs: dict[str, StageCost] = {"parameters": self.parameters, "memory": self.memory_bytes, "time": self.time_ms}
        return split(costs[heuristic], len(self.layers), len(self.in_flight))

    def parameters(self, stage: int, start: int, stop: int) -> int:
        return sum(layer.parameters for layer in self.layers[start:stop])

    def memory_bytes(self, stage: int, start: int, stop: int) -> int:
        """Parameters, gradients, optimizer state, and the activations of all microbatches in flight."""
        activations = sum(layer.activation_bytes for layer in self.layers[start:stop])
        return self.state_bytes * self.parameters(stage, start, stop) + self.in_flight[stage] * activations

    def time_ms(self, stage: int, start: int, stop: int) -> float:
        """Forward and backward of one microbatch."""
        return sum(layer.forward_ms + layer.backward_ms for layer in self.layers[start:stop])

    def table(self, boundaries: Sequence[int]) -> str:
        """The stages that `boundaries` make, one line each, for people."""
        lines = ["stage  layers  parameters     memory       time"]
        for stage, (start, stop) in enumerate(itertools.pairwise(boundaries)):
            place = (stage, start, stop)
            lines.append(
                f"{stage:>5}  {f'{start}-{stop - 1}':>6}  {self.parameters(*place):>10,}"
                f"  {self.memory_bytes(*place) / 1e6:>6.2f} MB  {self.time_ms(*place):>6.2f} ms"
            )
        return "\n".join(lines)


def microbatches_in_flight(stages: int, microbatches: int, schedule: str) -> list[int]:
    """How many microbatches each stage has run forward and not yet backward, at most: 1F1B, or "gpipe"."""
    return [microbatches if schedule == "gpipe" else min(stages - stage, microbatches) for stage in range(stages)]


class CutPipeline(PipelineModule):
    """A `PipelineModule` cut at given boundaries, for which `partition_method` has no word."""

    def __init__(self, layers: Sequence[Any], boundaries: Sequence[int], **options: Any) -> None:
        self._boundaries = list(boundaries)  # the parent's constructor asks for them
        super().__init__(layers=layers, num_stages=len(boundaries) - 1, **options)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._boundaries
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])
