"""Signal and noise of a batch's gradient, from the gradients of its single microbatches.

A batch's gradient is the mean of its microbatches'. Their variance gives the noise. The part of their mean that this
noise does not explain is signal (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A).
A few elements of a few weights are looked at, in a few steps that freeze nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tf_adapters.measuring.learning import SAMPLED_AT, Probe
from tf_adapters.weight_gradients.tokens import Rows, common_input, inclusion_chances

__all__ = ["GradientNoise", "RowObserver", "chosen_weights"]

_WEIGHTS = 8
"""Most weights of a stage that are looked at. They are spread evenly over it."""

_ELEMENTS = 65_536
"""Most elements of a weight that are looked at."""

_NEWEST = 8
"""Probes that are kept: the noise grows while a model learns."""


class GradientNoise:
    """Probes of one rank's stages. A probe is one step with nothing frozen.

    Args:
        weights: the parameters to look at, by stage and name; of many a few are chosen.
    """

    def __init__(self, weights: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> None:
        chosen = {stage: chosen_weights(of_stage) for stage, of_stage in weights.items()}
        self._weights = {stage: of_stage for stage, of_stage in chosen.items() if of_stage}
        self._running: dict[int, _RunningProbe] = {}
        self._ended: dict[int, deque[torch.Tensor]] = {stage: deque(maxlen=_NEWEST) for stage in self._weights}

    def begin(self) -> None:
        """A step begins that is a probe: look at every microbatch's gradients until ``end``."""
        self.abandon()
        self._running = {stage: _RunningProbe(weights) for stage, weights in self._weights.items()}

    def observer(self, stage: int) -> RowObserver | None:
        """Return the function that sees the tokens of tapped layers' weight gradients; None outside of a probe."""
        probe = self._running.get(stage)
        return None if probe is None else probe.observer

    def end(self, microbatches: int) -> None:
        """The step has ended, with this many microbatches. Nothing waits for the device."""
        for stage, probe in self._running.items():
            seen = probe.result(microbatches)
            if seen is not None:
                self._ended[stage].append(seen)
        self.abandon()

    def abandon(self) -> None:
        """Stop looking, and forget the probe that runs."""
        for probe in self._running.values():
            probe.remove()
        self._running = {}

    def probes(self) -> dict[int, tuple[Probe, ...]]:
        """The newest probes by stage; none where gradients of single microbatches cannot be seen."""
        seen = {stage: [Probe(*values.tolist()) for values in ended] for stage, ended in self._ended.items()}
        return {stage: tuple(probe for probe in probes if probe.is_usable) for stage, probes in seen.items()}


class RowObserver:
    """Stands in a TokenSampler's place: every token is kept, and the noise that a draw would make is added up."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self.noise: torch.Tensor | float = 0.0

    def rows(self, weight: str, inputs: torch.Tensor, gradient: torch.Tensor) -> Rows:
        """Return all rows. Add to ``noise`` the variance that drawing tokens would give the gradient of ``weight``.

        Only the share of the weight's elements that are looked at counts.
        """
        tokens = gradient.shape[0]
        count = round(SAMPLED_AT * tokens)
        if weight in self._shares and 1 < count < tokens:
            sizes = common_input(inputs, gradient)[1].double()
            chances = inclusion_chances(sizes, count - 1)
            missed = sizes.square() * torch.where(chances > 0.0, 1.0 / chances - 1.0, 0.0)
            self.noise = self.noise + self._shares[weight] * missed.sum()
        return inputs, gradient


class _RunningProbe:
    """One stage's part of a probe: hooks on its weights add up their gradients and the squares of these."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        self._strides = {name: -(-weight.numel() // _ELEMENTS) for name, weight in weights.items()}
        self.observer = RowObserver({name: 1.0 / stride for name, stride in self._strides.items()})
        self._accumulated = {
            name: _Accumulated(weight, self._strides[name]) for name, weight in weights.items() if _shows_sums(weight)
        }
        self._sums: dict[str, torch.Tensor] = {}
        self._squares: torch.Tensor | float = 0.0
        self._gradients = 0
        self._hooks: list[Any] = []
        for name, weight in weights.items():
            self._hooks.append(weight.register_hook(self._hook(name, weight)))  # type: ignore[no-untyped-call]

    def _hook(self, name: str, weight: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        @torch.no_grad()
        def look(gradient: torch.Tensor) -> None:
            if getattr(weight, "grad_added_to_main_grad", False):  # by a fused kernel: this gradient is a dummy
                if name not in self._accumulated:
                    return
                sample = self._accumulated[name].newest()
            else:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                sample = local.reshape(-1)[:: self._strides[name]].float()
            self._squares = self._squares + sample.square().sum()
            self._sums[name] = self._sums[name].add_(sample) if name in self._sums else sample.clone()
            self._gradients += 1

        return look

    def result(self, microbatches: int) -> torch.Tensor | None:
        """``Probe``'s values; None where not every microbatch's gradient of every weight was seen apart."""
        if microbatches < 2 or self._gradients != microbatches * len(self._strides):
            return None
        total = torch.stack([values.square().sum() for values in self._sums.values()]).sum()
        noise = (self._squares - total / microbatches) / (microbatches - 1)
        signal = total / microbatches**2 - noise / microbatches
        draws = torch.as_tensor(self.observer.noise, device=total.device, dtype=total.dtype) / microbatches
        return torch.stack([signal, torch.as_tensor(noise), draws])

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Accumulated:
    """Finds the gradient that a fused kernel has added to a weight's ``main_grad``: the difference to the sum before.

    Source: megatron/core/tensor_parallel/layers.py; transformer_engine/pytorch/module/linear.py.
    """

    def __init__(self, weight: torch.nn.Parameter, stride: int) -> None:
        self._weight, self._stride = weight, stride
        self._before = self._sample()

    def newest(self) -> torch.Tensor:
        """The elements looked at of what was added since the last call."""
        now = self._sample()
        added, self._before = now - self._before, now
        return added

    @torch.no_grad()
    def _sample(self) -> torch.Tensor:
        main_grad: torch.Tensor = vars(self._weight)["main_grad"]
        return main_grad.reshape(-1)[:: self._stride].clone()


def _shows_sums(weight: torch.nn.Parameter) -> bool:
    """Return whether a weight's ``main_grad`` shows the sum after every microbatch, in fp32.

    In bf16 the rounding of the sum would count as noise.
    """
    main_grad = vars(weight).get("main_grad")
    overwritten = vars(weight).get("overwrite_main_grad", False)
    return isinstance(main_grad, torch.Tensor) and main_grad.dtype == torch.float32 and not overwritten


def chosen_weights(weights: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """At most ``_WEIGHTS`` of the matrices among ``weights``, evenly spread."""
    matrices: Sequence[str] = [name for name, weight in weights.items() if weight.ndim > 1 and weight.requires_grad]
    count = min(_WEIGHTS, len(matrices))
    return {name: weights[name] for name in (matrices[i * len(matrices) // count] for i in range(count))}
