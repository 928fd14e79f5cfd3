"""The masks of the step that runs, and what they leave without any update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tf_adapters.selection.masks import Mask
from tf_adapters.selection.units import Tie
from tf_adapters.training.pipeline import ParametersByStage

__all__ = ["StepMasks"]


class StepMasks:
    """Masks of one step, each drawn once.

    Args:
        draw: the mask of a (stage, microbatch) in the current step.
        parameters: this rank's stages, and the parameters of each by name.
        ties: weights that several stages hold.
    """

    def __init__(self, draw: Callable[[int, int], Mask], parameters: ParametersByStage, ties: Sequence[Tie]) -> None:
        self._draw, self._parameters = draw, parameters
        self._ties = {place: tie for tie in ties for place in tie}
        self._drawn: dict[tuple[int, int], Mask] = {}

    def clear(self) -> None:
        """Another step begins."""
        self._drawn.clear()

    def of(self, stage: int, microbatch: int) -> Mask:
        """The mask of a microbatch on a stage."""
        key = (stage, microbatch)
        if key not in self._drawn:
            self._drawn[key] = self._draw(stage, microbatch)
        return self._drawn[key]

    def local(self) -> Mapping[tuple[int, int], Mask]:
        """The masks that this rank's stages have taken so far, by (stage, microbatch)."""
        return {key: mask for key, mask in self._drawn.items() if key[0] in self._parameters}

    def held_parameters(self, microbatches: int) -> tuple[torch.nn.Parameter, ...]:
        """This rank's parameters that every microbatch froze, on every stage that holds them."""
        frozen: dict[int, frozenset[str]] = {}

        def names(stage: int) -> frozenset[str]:
            if stage not in frozen:
                frozen[stage] = self._frozen_by_all(stage, microbatches)
            return frozen[stage]

        return tuple(
            of_stage[name]
            for stage, of_stage in self._parameters.items()
            for name in sorted(names(stage))
            if all(held in names(other) for other, held in self._ties.get((stage, name), ()))
        )

    def _frozen_by_all(self, stage: int, microbatches: int) -> frozenset[str]:
        names = frozenset(self.of(stage, 0).names) if microbatches else frozenset()
        for microbatch in range(1, microbatches):
            if not names:
                break
            names &= frozenset(self.of(stage, microbatch).names)
        return names
