"""Parameters that a whole step froze, in an optimizer with scaled 16-bit moments such as Transformer Engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tf_adapters.megatron.optimizers import HeldParameters

LARGEST = torch.finfo(torch.float16).max / 2


class ScaledAdam(torch.optim.Optimizer):
    """A stand-in for FusedAdam, which needs CUDA: fp32 values in its state, and first moments in fp16 with a scale.

    As there, state is made whether a gradient came or not, and the step is counted for each group.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": 0})

    def initialize_state(self, parameter: torch.Tensor) -> None:
        zeros = torch.zeros_like(parameter, dtype=torch.float16)
        self.state[parameter] = {"exp_avg": zeros, "scale": torch.ones(1), "master_param": parameter.detach().float()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                gradient = vars(parameter).get("decoupled_grad")
                if gradient is None:
                    continue
                state = self.state[parameter]
                moment = 0.9 * state["exp_avg"].float() * state["scale"] + 0.1 * gradient
                state["scale"] = moment.abs().max().reshape(1) / LARGEST
                state["exp_avg"] = (moment / state["scale"]).half() if state["scale"] > 0 else moment.half()
                state["master_param"].mul_(0.9).sub_(group["lr"] * moment)
                parameter.data.copy_(state["master_param"])


def values(optimizer: ScaledAdam, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    return {"parameter": parameter.detach().clone(), **state}


@pytest.mark.parametrize("held_in", [{0}, {1}, {0, 1, 2}], ids=str)
def test_a_parameter_with_scaled_moments_stays_as_it_is_to_the_bit(held_in: set[int]) -> None:
    torch.manual_seed(0)
    frozen, trained = (torch.nn.Parameter(torch.randn(4, 4).bfloat16()) for _ in range(2))
    start = frozen.detach().clone()
    optimizer = ScaledAdam([frozen, trained])
    holder = HeldParameters(optimizer)
    optimizer.register_step_pre_hook(holder.before)
    optimizer.register_step_post_hook(holder.after)
    for step in range(3):
        before = values(optimizer, frozen) if optimizer.state.get(frozen) else {"parameter": start}
        moved = trained.detach().clone()
        held = step in held_in
        gradients: dict[Any, float] = {frozen: 0.0 if held else 1.0, trained: 1.0}
        for parameter, scale in gradients.items():
            parameter.decoupled_grad = scale * torch.randn(4, 4)
        holder.hold([frozen] if held else [])
        optimizer.step()
        after = values(optimizer, frozen)
        assert held == all(torch.equal(value, after[name]) for name, value in before.items())
        assert not torch.equal(moved, trained)
        if held and step == 0:
            assert torch.equal(after["master_param"].bfloat16(), start)
