"""An update that is taken back and made again is the update that would have been made at first, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tf_adapters.hosts.update_copies import UpdateCopies

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Trained:
    """Three parameters, one of which has no gradient in every second step, and a schedule of the learning rate."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(3)]
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 + step)
        for number, p in enumerate(self.parameters):
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = None if number == 2 and step % 2 else gradient

    @property
    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        tensors = [v for of in state.values() for v in of.values() if torch.is_tensor(v)]
        return [*(p.detach().clone() for p in self.parameters), *(v.clone() for v in tensors)]


def halve(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.mul_(0.5)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_that_is_made_again_is_the_step_with_other_gradients(name: str, in_place: bool) -> None:
    """The learning rate has changed since, and the gradients were zeroed or removed."""
    again, at_once = Trained(name), Trained(name)
    for step in range(4):
        for of in (again, at_once):
            of.give_gradients(step)
        halve([p for p in at_once.parameters if p.grad is not None])
        at_once.optimizer.step()
        copies = UpdateCopies(again.optimizer)
        again.optimizer.step()
        for of in (again, at_once):
            of.scheduler.step()
            of.optimizer.zero_grad(set_to_none=not in_place)
        gradients = [p.grad for p in again.parameters]
        copies.make_again(halve, again.optimizer.step)
        assert all(p.grad is before for p, before in zip(again.parameters, gradients, strict=True))
        assert len(again.values) == len(at_once.values)
        for ours, theirs in zip(again.values, at_once.values, strict=True):
            assert torch.equal(ours, theirs)
        assert again.scheduler.get_last_lr() == at_once.scheduler.get_last_lr()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_change_nothing(name: str) -> None:
    watched, alone = Trained(name), Trained(name)
    for step in range(3):
        for of in (watched, alone):
            of.give_gradients(step)
        UpdateCopies(watched.optimizer)
        for of in (watched, alone):
            of.optimizer.step()
    for ours, theirs in zip(watched.values, alone.values, strict=True):
        assert torch.equal(ours, theirs)
