"""Copies of what an optimizer's step overwrites: of held values, or of all, to take the step back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class HeldCopies:
    """Copies of values that the next step must leave as they are."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save the values of these tensors or views."""
        self._values += [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Restore the saved values, and drop them."""
        for tensor, value in self._values:
            tensor.copy_(value)  # both are detached
        self._values.clear()


class UpdateCopies:
    """Copies from just before one step of an optimizer: parameters, gradients, state and settings.

    They take as many bytes as the parameters with gradients, these gradients, and their state.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._groups = optimizer, list(optimizer.param_groups)
        updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._values = [(p, p.detach().clone()) for p in updated]
        self._gradients = [(p, p.grad.detach().clone()) for p in updated]
        self._state = {p: _copied(optimizer.state[p]) if p in optimizer.state else None for p in updated}
        self._settings = [_copied(_settings_of(group)) for group in self._groups]

    @property
    def num_bytes(self) -> int:
        tensors = [copy for pairs in (self._values, self._gradients) for _, copy in pairs]
        tensors += [copy for state in self._state.values() for copy in (state or {}).values() if torch.is_tensor(copy)]
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in own)

    @torch.no_grad()
    def make_again(self, change: Callable[[list[torch.nn.Parameter]], None], step: Callable[[], Any]) -> None:
        """Take the step back, and make it again with ``step`` after ``change`` of the parameters' gradients.

        The step uses the settings of the first step, even if a learning-rate schedule has changed them since. At the
        end, the optimizer gets the settings and gradients back that it had before this call.
        """
        groups = self._groups
        settings = [_settings_of(group) for group in groups]
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        for p, _ in gradients:
            p.grad = None
        self.take_back()
        for p, gradient in self._gradients:
            p.grad = gradient
        change([p for p, _ in self._gradients])
        with torch.enable_grad():
            step()
        for group, later in zip(groups, settings, strict=True):
            group.update(later)
        for p, later_gradient in gradients:
            p.grad = later_gradient

    @torch.no_grad()
    def take_back(self) -> None:
        """Take the step back: parameters, state and settings are those from before it."""
        for p, value in self._values:
            p.copy_(value)
        for p, state in self._state.items():
            self._put_back(p, state)
        for group, earlier in zip(self._groups, self._settings, strict=True):
            group.update(earlier)

    def _put_back(self, parameter: torch.nn.Parameter, earlier: Mapping[str, Any] | None) -> None:
        state = self._optimizer.state
        if earlier is None:  # the step has made it
            state.pop(parameter, None)
            return
        current = state[parameter]
        for name in [name for name in current if name not in earlier]:
            del current[name]
        for name, value in earlier.items():
            if torch.is_tensor(value) and torch.is_tensor(current.get(name)):
                current[name].copy_(value)
            else:
                current[name] = value


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in values.items()}
