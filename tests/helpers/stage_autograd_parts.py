"""Parts of random stages that speak to autograd themselves: hooks, ``torch.func``, gradients inside the forward."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from stage_parts import PARTS, ROWS, WIDTH, Part, Tensor, leaf, part
from torch import nn
from torch.utils.checkpoint import checkpoint


@leaf
def functional_call(self: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(self.layer, {k: p * 1.0 for k, p in self.layer.named_parameters()}, (x,))


@leaf
def functional_call_itself(self: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (x,))


@leaf
def vmap(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(self.layer)(x)


@leaf
def jvp(self: Any, x: Tensor) -> Tensor:
    output, tangent = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
    return output + tangent


@leaf
def vjp(self: Any, x: Tensor) -> Tensor:
    output, pull = torch.func.vjp(lambda inputs: torch.tanh(self.layer(inputs)), x)
    return output + pull(torch.ones_like(output))[0]


@leaf
def functional_grad(self: Any, x: Tensor) -> Tensor:
    return x + torch.func.vmap(torch.func.grad(lambda row: self.layer(row).square().sum()))(x)


@leaf
def gradient_penalty(self: Any, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = torch.tanh(self.layer(x))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + 0.1 * gradient


@leaf
def inner_gradient(self: Any, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = torch.tanh(self.layer(x))
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y + 0.1 * gradient


@leaf
def gradient_of_a_weight(self: Any, x: Tensor) -> Tensor:
    y = torch.tanh(self.layer(x))
    (gradient,) = torch.autograd.grad(y.square().mean(), self.layer.weight, create_graph=True)
    return y + gradient.square().mean()


@leaf
def local_loss(self: Any, x: Tensor) -> Tensor:
    self.layer(x.detach()).square().mean().backward()
    return x * 0.9


PARTS["LocalLoss"].repeats = False


@leaf
def relu_in_place(self: Any, x: Tensor) -> Tensor:
    return torch.relu_(self.layer(x))


@leaf
def add_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y += x
    return y.mul_(0.5)


@leaf
def view_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y[:, 0] = 0.0
    y.view(-1)[3].mul_(2.0)
    return y


@part
class InputInPlace(Part):
    repeats = False

    def build(self, draw: random.Random) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return (x.clone() if x.is_leaf else x).mul_(0.7)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@leaf
def own_function(self: Any, x: Tensor) -> Tensor:
    return Product.apply(x, self.layer.weight)


# --- hooks of the user's -------------------------------------------------------------------------------------------


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def clamp(gradient: Tensor) -> Tensor:
    return gradient if gradient.is_complex() else gradient.clamp(-1e-2, 1e-2)


def look(seen: list[Tensor], gradient: Tensor) -> None:
    seen.append(gradient.detach().clone())


def look_at_sum(seen: list[Tensor], parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    seen.append(parameter.grad.detach().clone())


@part
class ParameterHook(Part):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.layer.weight.register_hook(clamp)
        self.layer.weight.register_hook(partial(look, self.seen))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@part
class AccumulatedHook(Part):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.layer.weight.register_post_accumulate_grad_hook(partial(look_at_sum, self.seen))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def halve_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


def halve_input(module: nn.Module, args: Any) -> Any:
    return tuple(arg * 0.5 for arg in args)


def halve_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(g if g is None else g * 0.5 for g in inputs)


def double_gradients(module: nn.Module, outputs: Any) -> Any:
    return tuple(g if g is None else g * 2.0 for g in outputs)


@part
class ModuleHooks(Part):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        layer = self.layer
        registers = [
            partial(layer.register_forward_hook, halve_output),
            partial(layer.register_forward_pre_hook, halve_input),
            partial(layer.register_full_backward_hook, halve_gradients),
            partial(layer.register_full_backward_pre_hook, double_gradients),
        ]
        for register in draw.sample(registers, draw.randint(1, 3)):
            register()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# --- around other parts --------------------------------------------------------------------------------------------


class Around(Part):
    takes = 1

    def build(self, draw: random.Random) -> None: ...

    def forward(self, x: Tensor) -> Any:
        return self.around(x, *self.inside)

    def around(self, x: Tensor, *inside: nn.Module) -> Any:
        raise NotImplementedError


def around(run: Any) -> type[Part]:
    """A part that runs the parts inside it, as many as the function takes."""
    name = "".join(word.capitalize() for word in run.__name__.split("_"))
    takes = run.__code__.co_argcount - 2
    place = {"__module__": __name__, "__qualname__": run.__name__}
    return part(type(name, (Around,), {"around": run, "takes": takes, **place}))


@around
def residual(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    return x + inside(x)


@around
def checkpointed(self: Any, x: Tensor, inside: nn.Module) -> Any:
    return checkpoint(inside, x, use_reentrant=False)


@around
def autocast(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = inside(x)
    return y.float()


@around
def sometimes(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    """By a size that rounding does not decide: a norm's outputs add up to zero, or nearly so."""
    return inside(x) if bool(x.detach().square().mean() > 0.5) else x * 0.9


@around
def no_grad(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    with torch.no_grad():
        y = inside(x)
    return x + y


@around
def detached_input(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    return x + inside(x.detach())


@around
def detached_output(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    return x + inside(x).detach()


@around
def frozen(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    return inside(x)


PARTS["Frozen"].build = lambda self, draw: self.requires_grad_(False) and None  # type: ignore[method-assign]


@around
def activation_hook(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    y = inside(x)
    if not y.requires_grad:  # masks may freeze all that is before it, and torch refuses a hook there
        return y * 1.0
    y.register_hook(halve)
    y.register_hook(partial(look, self.seen))
    return y * 1.0


@around
def retained(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    y = inside(x)
    y.retain_grad()
    self.seen.append(y)  # whose gradient is read after the batch
    return y * 1.0


PARTS["Retained"].repeats = False


def on_the_way(tensor: Tensor) -> Tensor:
    return tensor


@around
def saved_tensor_hooks(self: Any, x: Tensor, inside: nn.Module) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, on_the_way):
        return inside(x)


@around
def added(self: Any, x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return one(x) + other(x)


@around
def multiplied(self: Any, x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return one(x) * torch.sigmoid(other(x))


@around
def in_a_dict(self: Any, x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    outputs = {"one": one(x), "other": {"deeper": [other(x)]}}
    return outputs["one"] - outputs["other"]["deeper"][0]


@part
class Joined(Part):
    takes = 2

    def build(self, draw: random.Random) -> None:
        self.layer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.inside
        return self.layer(torch.cat([one(x), other(x)], -1))


@around
def one_after_the_other(self: Any, x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return other(one(x)).reshape(ROWS, WIDTH)
