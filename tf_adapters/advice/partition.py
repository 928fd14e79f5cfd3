"""Search for the cut of a model into stages with the shortest batch, for ``tf-adapters balance``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Kind

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)  # the columns of span_ms

Cuts = tuple[int, ...]
"""The first piece of each stage but the first; ascending."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that stay together, and ms of a microbatch with nothing frozen."""

    names: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    parameters: int = 0


class CutPipeline:
    """A batch of a schedule as a function of where the model is cut.

    Args:
        dag: the graph of one batch, with whole backwards or halves.
        pieces: the layers of all stages, in order.
        rest: by stage, the time of a microbatch outside of layers, which no cut moves.
        halves: by stage, the share of a backward that is its input gradient, in [0, 1].
    """

    def __init__(
        self, dag: PipelineDag, pieces: Sequence[Piece], rest: Sequence[Piece], halves: Sequence[float]
    ) -> None:
        self._dag = dag
        self._forward = [0.0, *accumulate(piece.forward_ms for piece in pieces)]
        self._backward = [0.0, *accumulate(piece.backward_ms for piece in pieces)]
        self._rest, self._last = rest, len(pieces)
        self._stages = np.array([action.stage for action in self._dag.actions])
        self._kinds = np.array([_KINDS.index(action.kind) for action in self._dag.actions])
        self._halves = halves

    def stage_times(self, cuts: Cuts) -> tuple[tuple[float, float], ...]:
        """ms of each stage's forward and backward of a microbatch."""
        bounds = pairwise((0, *cuts, self._last))
        return tuple(self._one(stage, start, stop) for stage, (start, stop) in enumerate(bounds))

    def _one(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        rest = self._rest[stage]
        return (
            rest.forward_ms + self._forward[stop] - self._forward[start],
            rest.backward_ms + self._backward[stop] - self._backward[start],
        )

    def span_ms(self, cuts: Cuts) -> float:
        """The pipeline's part of a step in ms, with these cuts."""
        times = [
            (forward, backward, backward * half, backward * (1.0 - half))
            for (forward, backward), half in zip(self.stage_times(cuts), self._halves, strict=True)
        ]
        by_stage: NDArray[np.float64] = np.array(times)
        return self._dag.span(by_stage[self._stages, self._kinds])

    def even_cuts(self) -> Cuts:
        """The cuts whose longest stage, forward plus backward of a microbatch, is shortest."""
        stages = len(self._rest)
        best: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}  # by the piece at which the next stage begins
        for stage in range(stages):
            after: dict[int, tuple[float, Cuts]] = {}
            for start, (longest, cuts) in best.items():
                for stop in range(start + 1, self._last - (stages - stage - 1) + 1):
                    whole = max(longest, sum(self._one(stage, start, stop)))
                    if stop not in after or whole < after[stop][0]:
                        after[stop] = (whole, (*cuts, stop))
            best = after
        return best[self._last][1][:-1]

    def best_cuts(self, cuts: Cuts) -> Cuts:
        """The best cuts that a descent by ``_moves`` finds from ``cuts`` and from ``even_cuts``."""
        return min((self._descend(start) for start in (cuts, self.even_cuts())), key=self.span_ms)

    def _descend(self, cuts: Cuts) -> Cuts:
        shortest = self.span_ms(cuts)
        while True:
            moved = min(((self.span_ms(m), m) for m in _moves(cuts, self._last)), default=(shortest, cuts))
            if not moved[0] < shortest * (1.0 - 1e-9):  # no number is less than one that is not a number
                return cuts
            shortest, cuts = moved


def _moves(cuts: Cuts, pieces: int) -> Iterator[Cuts]:
    """All ways to move neighbouring cuts by one piece that leave each stage a piece."""
    for first in range(len(cuts)):
        for last in range(first, len(cuts)):
            for by in (-1, 1):
                moved = tuple(cut + by if first <= place <= last else cut for place, cut in enumerate(cuts))
                if all(left < right for left, right in pairwise((0, *moved, pieces))):
                    yield moved
