"""Signal and noise of a batch's gradient, from the gradients of its single microbatches.

A batch's gradient is the mean of its microbatches' gradients. Their variance gives the noise. The part of their mean
that this noise does not explain is signal (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
appendix A). A few elements of a few weights are observed, in a few steps that freeze nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tf_adapters.measuring.learning import SAMPLED_AT, Probe
from tf_adapters.weight_gradients.tokens import Rows, common_input, inclusion_chances

_WEIGHTS = 8
"""The most weights of a stage that are observed. They are spread evenly over it."""

_ELEMENTS = 65_536
"""The most elements of a weight that are observed."""

_NEWEST = 8
"""The most probes of a stage that are retained. Older ones are dropped: the noise grows while a model learns."""


class GradientNoise:
    """Probes of one rank's stages. A probe is one step with nothing frozen.

    Args:
        weights: the parameters by stage and name, from which a few are chosen.
    """

    def __init__(self, weights: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> None:
        chosen = {stage: chosen_weights(of_stage) for stage, of_stage in weights.items()}
        self._weights = {stage: of_stage for stage, of_stage in chosen.items() if of_stage}
        self._running: dict[int, _RunningProbe] = {}
        self._ended: dict[int, deque[torch.Tensor]] = {stage: deque(maxlen=_NEWEST) for stage in self._weights}

    def begin(self) -> None:
        """Begin a probe: observe every microbatch's gradients until ``end``."""
        self.abandon()
        self._running = {stage: _RunningProbe(weights) for stage, weights in self._weights.items()}

    def observer(self, stage: int) -> _RunningProbe | None:
        """Return the sampler that observes the tokens of tapped layers and keeps them all; None outside a probe."""
        return self._running.get(stage)

    def end(self, microbatches: int) -> None:
        """End the probe of a step with this number of microbatches, without a wait for the device."""
        for stage, probe in self._running.items():
            seen = probe.result(microbatches)
            if seen is not None:
                self._ended[stage].append(seen)
        self.abandon()

    def abandon(self) -> None:
        """Stop the running probe and drop it."""
        for probe in self._running.values():
            probe.remove()
        self._running = {}

    def probes(self) -> dict[int, tuple[Probe, ...]]:
        """Return the newest probes by stage; none if the gradients of single microbatches cannot be seen."""
        seen = {stage: [Probe(*values.tolist()) for values in ended] for stage, ended in self._ended.items()}
        return {stage: tuple(probe for probe in probes if probe.is_usable) for stage, probes in seen.items()}


class _RunningProbe:
    """One stage's part of a probe: hooks on its weights add up their gradients and the squares of these."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        self._strides = {name: -(-weight.numel() // _ELEMENTS) for name, weight in weights.items()}
        self._main = {name: self._main_grad(name, w) for name, w in weights.items() if _shows_sums(w)}
        self._sums: dict[str, torch.Tensor] = {}
        self._squares: torch.Tensor | float = 0.0
        self._of_draws: torch.Tensor | float = 0.0
        self._gradients = 0
        self._hooks: list[Any] = []
        for name, weight in weights.items():
            self._hooks.append(weight.register_hook(self._hook(name, weight)))  # type: ignore[no-untyped-call]

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows:
        """Return all rows. Add up the variance that drawing tokens would give the gradient of ``weight``.

        Only the observed share of the weight's elements counts.
        """
        tokens = gradient.shape[0]
        count = round(SAMPLED_AT * tokens)
        if weight in self._strides and 1 < count < tokens:
            sizes = common_input(inputs, gradient)[1].double()
            chances = inclusion_chances(sizes, count - 1)
            missed = sizes.square() * torch.where(chances > 0.0, 1.0 / chances - 1.0, 0.0)
            self._of_draws = self._of_draws + 1.0 / self._strides[weight] * missed.sum()
        return inputs, gradient

    def _hook(self, name: str, weight: torch.nn.Parameter) -> Callable[[torch.Tensor | None], None]:
        @torch.no_grad()
        def look(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # a function of the user's passes none on
                return
            if not getattr(weight, "grad_added_to_main_grad", False):
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                sample = local.reshape(-1)[:: self._strides[name]].float()
            elif name in self._main:  # a fused kernel has added the gradient to main_grad: this one is a dummy
                before, self._main[name] = self._main[name], self._main_grad(name, weight)
                sample = self._main[name] - before
            else:
                return
            self._squares = self._squares + sample.square().sum()
            self._sums[name] = self._sums[name].add_(sample) if name in self._sums else sample.clone()
            self._gradients += 1

        return look

    @torch.no_grad()
    def _main_grad(self, name: str, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return the observed elements of a weight's ``main_grad``, to which a fused kernel adds gradients.

        Source: megatron/core/tensor_parallel/layers.py; transformer_engine/pytorch/module/linear.py.
        """
        main_grad: torch.Tensor = vars(weight)["main_grad"]
        return main_grad.reshape(-1)[:: self._strides[name]].clone()

    def result(self, microbatches: int) -> torch.Tensor | None:
        """Return ``Probe``'s values; None unless every microbatch's gradient of every weight was seen separately."""
        if microbatches < 2 or self._gradients != microbatches * len(self._strides):
            return None
        total = torch.stack([values.square().sum() for values in self._sums.values()]).sum()
        noise = (self._squares - total / microbatches) / (microbatches - 1)
        signal = total / microbatches**2 - noise / microbatches
        draws = torch.as_tensor(self._of_draws, device=total.device, dtype=total.dtype) / microbatches
        return torch.stack([signal, torch.as_tensor(noise), draws])

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _shows_sums(weight: torch.nn.Parameter) -> bool:
    """Return whether a weight's ``main_grad`` shows the sum after every microbatch, in fp32.

    In bf16 the rounding of the sum would count as noise.
    """
    main_grad = vars(weight).get("main_grad")
    overwritten = vars(weight).get("overwrite_main_grad", False)
    return isinstance(main_grad, torch.Tensor) and main_grad.dtype == torch.float32 and not overwritten


def chosen_weights(weights: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Return at most ``_WEIGHTS`` of the matrices among ``weights``, evenly spread."""
    matrices: Sequence[str] = [name for name, weight in weights.items() if weight.ndim > 1 and weight.requires_grad]
    count = min(_WEIGHTS, len(matrices))
    return {name: weights[name] for name in (matrices[i * len(matrices) // count] for i in range(count))}
