"""Weight gradients from a sample of the tokens. They are unbiased, and every token left out saves its work.

The weight gradient of a linear layer is a sum over tokens, ``dW = sum_i g_i x_i^T``. The part ``c`` that all inputs
have in common is computed exactly: ``(sum_i g_i) c^T``. The rest, ``sum_i g_i (x_i - c)^T``, is sampled. A token's
chance is proportional to the size of its summand, ``|g_i| |x_i - c|``, and at most 1. A drawn summand is divided by its
chance. Sources: Adelman et al. 2021, "Faster Neural Network Training with Approximate Tensor Operations"; Liu et
al. 2023, "WTA-CRS"; for ``c`` Saerndal et al. 1992, "Model Assisted Survey Sampling" (the difference estimator).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

Rows = tuple[torch.Tensor, torch.Tensor]
"""Inputs ``[tokens, inputs]`` and gradients of the output ``[tokens, outputs]`` of a layer."""

Chosen = tuple[torch.Tensor, torch.Tensor]
"""Positions of tokens, and the scale of each: the inverse of its chance."""

_NO_SIZE = 1e-200
_NO_NORM = 1e-30

_ROUNDING = 1e-6
"""The largest rounding error of a sum of chances."""

_IN_THE_MEAN = 256
"""The most tokens from which the direction of the common input is computed."""

_LEAST_OWN = 0.1
"""Least norm of an input's own part, as a share of the input's norm. Below it, rounding errors dominate."""


class TokenSample(NamedTuple):
    """A sample of all tokens: the common input ``[inputs]``, and some tokens for the rest of the inputs."""

    common: torch.Tensor
    chosen: torch.Tensor
    scales: torch.Tensor


class TokenSampler:
    """Draws the tokens of one microbatch on one stage, layer by layer, always in the same order.

    Args:
        key: (seed, step, stage, microbatch). The draw is a function of this key and the tokens.
        kept: returns the share of the tokens, in (0, 1], that the gradient of the weight of this name uses.
    """

    def __init__(self, key: Sequence[int], kept: Callable[[str], float]) -> None:
        self.key = tuple(key)
        self._rng, self._kept = np.random.default_rng(key), kept

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows:
        """Return the rows from which the gradient of ``weight`` is computed, as many as tokens are kept.

        They are the rows of the drawn tokens, and one for the common input. Over many draws, the mean of their product
        is the whole gradient.
        """
        sample = self.sample(weight, inputs, gradient)
        return (inputs, gradient) if sample is None else _rows(sample, inputs, gradient)

    def sample(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> TokenSample | None:
        """Return the sample for the gradient of ``weight``; None if all tokens are kept."""
        tokens = gradient.shape[0]
        count = max(2, round(self._kept(weight) * tokens))
        if count >= tokens:
            return None
        common, sizes = common_input(inputs, gradient)
        return TokenSample(common, *self.choose(weight, sizes, count - 1))

    def choose(self, weight: str, sizes: torch.Tensor, count: int) -> Chosen:
        """Draw ``count`` of the tokens of these ``sizes`` ``[tokens]``, for the gradient of ``weight``."""
        return draw(inclusion_chances(sizes, count), count, float(self._rng.random()))


def _rows(sample: TokenSample, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows:
    common, chosen, scales = sample
    # The factor of each token's gradient in the row of the common input: 1, less the token's scale if it is drawn. An
    # infinity or a NaN in a gradient is therefore in the result, whether or not the token is drawn.
    not_drawn = scales.new_ones(len(gradient)).index_add_(0, chosen, scales, alpha=-1).to(gradient.dtype)
    places = torch.cat([chosen, chosen[:1]])  # the last row is overwritten, which is cheaper than to append one
    rows, gradients = inputs.index_select(0, places), gradient.index_select(0, places)
    narrow = min(rows, gradients, key=lambda tensor: tensor.shape[1])
    narrow[:-1].mul_(scales.to(narrow.dtype).unsqueeze(1))
    rows[-1] = common
    torch.mv(gradient.t(), not_drawn, out=gradients[-1])
    return rows, gradients


def common_input(inputs: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the common part of inputs, ``[inputs]``, and the size ``[tokens]`` of each token's remaining summand.

    The common part has the direction of the mean of a few tokens, and the length that leaves the smallest remainder. It
    is zero if outliers dominate that mean.
    """
    mean = inputs[:: -(-inputs.shape[0] // _IN_THE_MEAN)].mean(dim=0, dtype=_precise(inputs))
    direction = torch.nn.functional.normalize(mean, dim=0, eps=_NO_NORM)  # along the mean half floats may overflow
    along = (inputs @ direction.to(inputs.dtype)).to(mean.dtype)
    of_inputs, of_gradients = _norms(inputs), _norms(gradient).to(mean.dtype)
    weights, squares = of_gradients.square(), of_inputs.square()
    length = torch.dot(weights, along) / weights.sum().clamp_(min=_NO_NORM)
    own = torch.addcmul(squares, length, torch.sub(length, along, alpha=2.0))
    own = torch.maximum(own, _LEAST_OWN**2 * squares)
    return length * direction, own.sqrt_().mul_(of_gradients)


def inclusion_chances(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return chances proportional to ``sizes`` ``[tokens]``, at most 1, that add up to ``count``.

    If fewer tokens than ``count`` have a size above 0, these have the chance 1.
    """
    sizes = sizes.double()
    up_to = sizes.sort().values.cumsum(0).clamp_(min=_NO_SIZE)  # of a token and all smaller ones
    left = torch.arange(count + 1 - sizes.numel(), count + 1, device=sizes.device)
    # A token is certain if its chance would be above 1. These are the largest ones. The others share the rest of the
    # count in proportion to their sizes. The factor grows with each token that has to be made certain, and shrinks with
    # each further one, so the largest factor is the right one.
    factor = (left / up_to).amax()
    return (sizes * factor).clamp_(max=1.0)


def draw(chances: torch.Tensor, count: int, offset: float) -> Chosen:
    """Draw ``count`` tokens by systematic sampling, without a wait for the device.

    Each token is drawn with its chance; ``offset`` in [0, 1) is uniform. The chances add up to less than ``count`` if
    fewer tokens have a size above 0. Each of these is then drawn once, and the rest of the count gets a scale of 0.
    """
    ends = chances.cumsum(0)
    numbers = torch.arange(count, device=chances.device, dtype=ends.dtype)
    chosen = torch.searchsorted(ends, numbers + offset, right=True).clamp_(max=chances.numel() - 1)
    scales = chances.index_select(0, chosen).reciprocal_()
    surplus = numbers >= ends[-1].sub(_ROUNDING).ceil()
    return chosen, scales.nan_to_num_(nan=math.nan, posinf=0.0).masked_fill_(surplus, 0.0)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=_precise(rows))
    return norms


def _precise(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
