"""Weight gradients from a sample of the tokens: unbiased, and as much work less as tokens are left out.

The weight gradient of a linear layer is a sum over tokens, ``dW = sum_i g_i x_i^T``. A token's chance to be drawn is in
proportion to ``|g_i| |x_i|``, the size of what it adds, and at most 1; what is drawn is divided by its chance. Sources:
Adelman et al. 2021, "Faster Neural Network Training with Approximate Tensor Operations"; Liu et al. 2023, "WTA-CRS".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["Chosen", "Rows", "TokenSampler", "draw", "inclusion_chances", "row_sizes"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Inputs ``[tokens, inputs]`` and gradients of the output ``[tokens, outputs]`` of a layer."""

Chosen = tuple[torch.Tensor, torch.Tensor]
"""Positions of tokens, and what each is multiplied by: the inverse of its chance."""

_NO_SIZE = 1e-200


class TokenSampler:
    """Draws the tokens of one microbatch on one stage, layer by layer, always in the same order.

    Args:
        key: what the draw is a function of, besides the tokens: (seed, step, stage, microbatch).
        kept: the share of the tokens to keep of the weight of this name, in (0, 1].
    """

    def __init__(self, key: Sequence[int], kept: Callable[[str], float]) -> None:
        self.key = tuple(key)
        self._rng, self._kept = np.random.default_rng(key), kept

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows:
        """The rows that the gradient of ``weight`` is made from, scaled so that its mean over draws is the whole."""
        tokens = gradient.shape[0]
        count = max(1, round(self._kept(weight) * tokens))
        if count >= tokens:
            return inputs, gradient
        chosen, scales = self.choose(weight, row_sizes(inputs, gradient), count)
        inputs, gradient = inputs.index_select(0, chosen), gradient.index_select(0, chosen)
        narrow = min(inputs, gradient, key=lambda rows: rows.shape[1])
        narrow.mul_(scales.to(narrow.dtype).unsqueeze(1))
        return inputs, gradient

    def choose(self, weight: str, sizes: torch.Tensor, count: int) -> Chosen:
        """``count`` of the tokens of these ``sizes`` ``[tokens]``, for the gradient of ``weight``."""
        return draw(inclusion_chances(sizes, count), count, float(self._rng.random()))


def inclusion_chances(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Chances in proportion to ``sizes`` ``[tokens]``, at most 1, that add up to ``count``.

    Where fewer tokens than ``count`` have any size, these have the chance 1. What is not finite makes chances that are
    not, so that an overflow stays one.
    """
    sizes = sizes.double()
    descending = sizes.sort(descending=True).values
    rest = descending.flip(0).cumsum(0).flip(0)  # of a token and all smaller ones
    left = count - torch.arange(sizes.numel(), device=sizes.device)
    # The others share what is left of the count in proportion; none of them may exceed 1.
    certain = (descending * left > rest).sum()
    factor = (count - certain) / rest.gather(0, certain.unsqueeze(0)).clamp(min=_NO_SIZE)
    return (sizes * factor).clamp(max=1.0) + 0.0 * sizes.sum()


def draw(chances: torch.Tensor, count: int, offset: float) -> Chosen:
    """``count`` tokens by systematic sampling.

    Each token is drawn with its chance; ``offset`` in [0, 1) is uniform. Nothing waits for the device.
    """
    ends = chances.cumsum(0)
    points = torch.arange(count, device=chances.device, dtype=ends.dtype) + offset
    chosen = torch.searchsorted(ends, points, right=True).clamp(max=chances.numel() - 1)
    of_chosen = chances.index_select(0, chosen)
    return chosen, torch.where(of_chosen == 0, of_chosen, 1.0 / of_chosen)


def row_sizes(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The size ``[tokens]``, float32, of what each token adds to a weight gradient: the norm of its outer product."""
    return _norms(gradient) * _norms(inputs)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms
