"""The masks of the step that runs, what they leave without any update, and what masks have frozen so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tf_adapters.measuring.phase import Phase
from tf_adapters.selection.freeze_units import Tie
from tf_adapters.selection.masks import NOTHING_FROZEN, Mask
from tf_adapters.training.pipeline import ParametersByStage

_MOST_STEPS = 1_024
"""Steps whose frozen share is recorded: enough for monitoring, the ramp and what follows."""

Scale = tuple[torch.nn.Parameter, float]
"""A parameter, and what its gradient is multiplied by."""


class StepMasks:
    """Masks of one step. ``draw`` returns those of a stage, one for each microbatch, and is called once a stage."""

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

    def frozen(self) -> Mapping[int, Sequence[frozenset[str]]]:
        """Return, for each of this rank's stages with masks, the names that each microbatch froze.

        The name of a tied weight is among them only if all of its stages froze it. Otherwise it still learns.
        """
        return {
            stage: [
                frozenset(name for name in mask.names if self._is_frozen(stage, name, microbatch))
                for microbatch, mask in enumerate(masks)
            ]
            for stage, masks in self.local().items()
        }

    def held_parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return tuple(
            of_stage[name]
            for stage, of_stage in self._parameters.items()
            for name in sorted(self._frozen_by_all(stage))
            if all(held in self._frozen_by_all(other) for other, held in self._ties.get((stage, name), ()))
        )

    def scales(self) -> dict[int, list[Scale]]:
        """Return factors that turn gradients into means over the microbatches that computed them, by stage.

        Only parameters that some but not all microbatches froze have a factor.
        """
        return {stage: list(self._scales_of(stage)) for stage in self._parameters}

    def _scales_of(self, stage: int) -> Iterator[Scale]:
        masks = self._of_stage(stage)
        frozen = Counter(name for mask in masks for name in mask.names)
        for name in sorted(frozen):
            if frozen[name] < len(masks):
                yield self._parameters[stage][name], len(masks) / (len(masks) - frozen[name])

    def _is_frozen(self, stage: int, name: str, microbatch: int) -> bool:
        """Return whether a name that a microbatch froze on a stage is frozen on all other stages that hold it."""
        places = self._ties.get((stage, name), ())
        return all(other == stage or held in self.of(other, microbatch).names for other, held in places)

    def _of_stage(self, stage: int) -> Sequence[Mask]:
        if stage not in self._drawn:
            self._drawn[stage] = self._draw(stage)
        return self._drawn[stage]

    def _frozen_by_all(self, stage: int) -> frozenset[str]:
        masks = self._of_stage(stage)
        return frozenset(masks[0].names).intersection(*(mask.names for mask in masks[1:])) if masks else frozenset()


class MaskTally:
    """Counts frozen shares by stage and step, and how often stable freezing froze each parameter.

    A run may load an earlier state and go on from there. Steps after that state then count no more.
    """

    def __init__(self) -> None:
        self._newest_step = 0
        self._shares: dict[int, list[float]] = defaultdict(list)
        self._frozen: dict[int, Counter[str]] = defaultdict(Counter)
        self._microbatches: Counter[int] = Counter()

    def add(self, step: int, phase: Phase, step_masks: StepMasks) -> None:
        if step <= self._newest_step:
            self._go_back_to(step)
        self._newest_step = step
        for stage, masks in step_masks.local().items():
            if step <= _MOST_STEPS:
                shares = self._shares[stage]
                shares += [0.0] * (step - 1 - len(shares))  # steps before a resume
                shares.append(sum(mask.share for mask in masks) / len(masks))
        for stage, frozen in step_masks.frozen().items() if phase is Phase.STABLE else ():
            self._microbatches[stage] += len(frozen)
            for names in frozen:
                self._frozen[stage].update(names)

    def _go_back_to(self, step: int) -> None:
        """Forget ``step`` and all later ones. Counts of parameters begin again, as they do in a new process."""
        for shares in self._shares.values():
            del shares[step - 1 :]
        self._frozen.clear()
        self._microbatches.clear()

    def frozen_share(self) -> dict[int, tuple[float, ...]]:
        """By stage, the mean over microbatches of the work frozen, as a share of the freezable, in steps 1, 2, ..."""
        return {stage: tuple(shares) for stage, shares in self._shares.items()}

    def parameter_freeze_ratio(self) -> dict[int, dict[str, float]]:
        """By stage and name, the share of stable freezing's microbatches in which a parameter was frozen."""
        return {
            stage: {name: count / self._microbatches[stage] for name, count in sorted(counts.items())}
            for stage, counts in self._frozen.items()
        }
