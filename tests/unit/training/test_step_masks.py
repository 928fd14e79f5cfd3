"""What the tally of masks says of a run, also of one that has gone back to an earlier state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tf_adapters.measuring.phase import Phase
from tf_adapters.selection.masks import Mask
from tf_adapters.training.step_masks import MaskTally, StepMasks

PARAMETERS = {0: {"w": torch.nn.Parameter(torch.zeros(1)), "v": torch.nn.Parameter(torch.zeros(1))}}


def masks_of(masks: Sequence[Mask]) -> StepMasks:
    drawn = StepMasks(lambda stage: masks, PARAMETERS, ())
    drawn.draw()
    return drawn


def tallied(shares: Sequence[tuple[int, float]], phase: Phase = Phase.STABLE) -> MaskTally:
    """The tally of steps, given by number, that froze these shares; a step froze "w" if its share is above a half."""
    tally = MaskTally()
    for step, share in shares:
        tally.add(step, phase, masks_of([Mask(names=("w",) if share > 0.5 else (), share=share)]))
    return tally


def test_a_run_that_goes_on_from_an_earlier_step_counts_each_step_once() -> None:
    tally = tallied([(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9), (2, 0.6), (3, 0.3)])
    assert tally.frozen_share() == {0: (0.1, 0.6, 0.3)}
    assert tally.parameter_freeze_ratio() == {0: {"w": 0.5}}  # of the two steps since then


def test_steps_before_a_resume_have_frozen_nothing_that_is_known() -> None:
    assert tallied([(3, 0.5), (4, 0.25)]).frozen_share() == {0: (0.0, 0.0, 0.5, 0.25)}
