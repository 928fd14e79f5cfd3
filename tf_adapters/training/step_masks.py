"""The masks of the step that runs, and what they leave without any update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tf_adapters.selection.masks import NOTHING_FROZEN, Mask
from tf_adapters.selection.units import Tie
from tf_adapters.training.pipeline import ParametersByStage

__all__ = ["Scale", "StepMasks"]

Scale = tuple[torch.nn.Parameter, float]
"""A parameter, and what its gradient is multiplied by."""


class StepMasks:
    """Masks of one step, each stage's drawn once.

    Args:
        draw: the masks of a stage in the current step, one for each microbatch.
        parameters: this rank's stages, and the parameters of each by name.
        ties: weights that several stages hold.
    """

    def __init__(
        self, draw: Callable[[int], Sequence[Mask]], parameters: ParametersByStage, ties: Sequence[Tie]
    ) -> None:
        self._draw, self._parameters = draw, parameters
        self._ties = {place: tie for tie in ties for place in tie}
        self._drawn: dict[int, Sequence[Mask]] = {}

    def clear(self) -> None:
        self._drawn.clear()

    def draw(self) -> None:
        """Draw the masks of this rank's stages now, so that nothing is drawn between two of a device's launches."""
        for stage in self._parameters:
            self._of_stage(stage)

    def of(self, stage: int, microbatch: int) -> Mask:
        """The mask of a microbatch on a stage; of one that the schedule has not, an empty one."""
        masks = self._of_stage(stage)
        return masks[microbatch] if microbatch < len(masks) else NOTHING_FROZEN

    def local(self) -> Mapping[int, Sequence[Mask]]:
        """The masks of this rank's stages that have been drawn, one for each microbatch."""
        return {stage: masks for stage, masks in self._drawn.items() if stage in self._parameters}

    def held_parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """This rank's parameters that every microbatch froze, on every stage that holds them."""
        return tuple(
            of_stage[name]
            for stage, of_stage in self._parameters.items()
            for name in sorted(self._frozen_by_all(stage))
            if all(held in self._frozen_by_all(other) for other, held in self._ties.get((stage, name), ()))
        )

    def scales(self) -> dict[int, list[Scale]]:
        """By stage of this rank, what makes a gradient the mean over the microbatches that computed it.

        Only of parameters that some of the microbatches froze, and not all of them.
        """
        return {stage: list(self._scales_of(stage)) for stage in self._parameters}

    def _scales_of(self, stage: int) -> Iterator[Scale]:
        masks = self._of_stage(stage)
        frozen = Counter(name for mask in masks for name in mask.names)
        for name in sorted(frozen):
            if frozen[name] < len(masks):
                yield self._parameters[stage][name], len(masks) / (len(masks) - frozen[name])

    def _of_stage(self, stage: int) -> Sequence[Mask]:
        if stage not in self._drawn:
            self._drawn[stage] = self._draw(stage)
        return self._drawn[stage]

    def _frozen_by_all(self, stage: int) -> frozenset[str]:
        masks = self._of_stage(stage)
        return frozenset(masks[0].names).intersection(*(mask.names for mask in masks[1:])) if masks else frozenset()
