"""Parts of random stages that are hostile to weight gradients which are computed later.

They are the kinds of ``hostile_situations``, as parts that stand among others. A part of the last stage may change the
loss. Some parts are hostile only from a step on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from hostile_situations import NormInPlace, Stop, in_place, rounded, through_data, through_numpy
from stage_parts import ROWS, WIDTH, Part, Tensor, part
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

HOSTILE: list[str] = []
"""The names of these parts."""


def hostile(kind: type[Part]) -> type[Part]:
    HOSTILE.append(kind.__name__)
    return part(kind)


class TwoLayers(Part):
    """Two linear layers. A checkpoint would change what its parts do, since they count calls or keep tensors."""

    repeats = False

    def build(self, draw: random.Random) -> None:
        self.one = nn.Linear(WIDTH, WIDTH)
        super().build(draw)


# --- something changes what the product is computed from -----------------------------------------------------------


@hostile
class LearnedPosition(Part):
    """A learned position takes the output's gradient as its own. Later microbatches add to it in place."""

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.position = nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.unsqueeze(0)) + self.position.unsqueeze(0)).squeeze(0)


def unchanged(gradient: Tensor) -> None: ...


CHANGES: dict[str, Callable[[Tensor], None]] = {"torch": in_place, "data": through_data, "numpy": through_numpy}


class Changed(torch.autograd.Function):
    """The input. The backward changes its gradient and passes the same tensor on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], None]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.change(gradient)
        return gradient, None


class ChangedGradient(TwoLayers):
    ways = tuple(CHANGES)
    later = True

    @property
    def change(self) -> Callable[[Tensor], None]:
        return CHANGES[self.way] if self.hostile else unchanged


@hostile
class ChangedByFunction(ChangedGradient):
    """A Function changes its gradient, which is also the gradient of a layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = Changed.apply(torch.tanh(self.one(x)), self.change)
        return hidden + self.layer(hidden.detach())


@hostile
class ChangedByHook(ChangedGradient):
    """A hook on one layer's output changes the gradient, which is also that of another layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        if one.requires_grad:
            one.register_hook(self.change)
        return one + self.layer(x)


@hostile
class NormBranch(TwoLayers):
    """A norm writes into its gradient, which is also the gradient of another branch's output."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.layer):
            x = NormInPlace.apply(x) + layer(x)
        return x


WRITTEN = (
    *("LearnedPosition", "ChangedByFunction", "ChangedByHook", "NormBranch"),
    *("StaticInput", "StaticGradient", "Workspace", "WorkspaceOfInputs"),
)
"""Parts that write to inputs or output gradients of layers before a weight gradient that waits is computed."""


class Buffer:
    """A tensor ``[ROWS, WIDTH]``, filled through torch, through a numpy view of it, or through both in turn."""

    def __init__(self, way: str) -> None:
        self.tensor = torch.zeros(ROWS, WIDTH)
        self.view = self.tensor.numpy()
        self.way, self.fills = way, 0

    def fill(self, values: Tensor) -> Tensor:
        self.fills += 1
        if self.way == "torch" or (self.way == "both" and self.fills % 2):
            self.tensor.copy_(values.detach())
        else:
            self.view[...] = values.detach().numpy()
        return self.tensor


@hostile
class StaticInput(TwoLayers):
    """A layer's input is copied into a buffer of a pool. The microbatch's backward gives the buffer back."""

    ways = ("torch", "numpy", "both")

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.pool = [Buffer(self.way)]

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        buffer = self.pool.pop() if self.pool else Buffer(self.way)
        with torch.no_grad():
            buffer.fill(x)
        if one.requires_grad:  # its gradient comes after the other layer's
            one.register_hook(partial(self._give_back, buffer))
        return torch.tanh(one) + self.layer(buffer.tensor)

    def _give_back(self, buffer: Buffer, gradient: Tensor) -> None:
        self.pool.append(buffer)


class Into(torch.autograd.Function):
    """Half of the input. The backward writes its gradient into a buffer and returns that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer) -> Tensor:
        ctx.buffer = buffer
        return 0.5 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.buffer.fill(0.5 * gradient), None


class WithBuffer(TwoLayers):
    ways = ("torch", "numpy", "both")

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.buffer = Buffer(self.way)


@hostile
class StaticGradient(WithBuffer):
    """The gradient of a layer's output is in a buffer that each microbatch fills again."""

    def forward(self, x: Tensor) -> Tensor:
        return Into.apply(self.layer(torch.tanh(self.one(x))), self.buffer)


@hostile
class Workspace(WithBuffer):
    """The gradients of two layers' outputs are in one buffer, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = Into.apply(self.one(x), self.buffer)
        return x + Into.apply(self.layer(torch.tanh(hidden)), self.buffer)


@hostile
class WorkspaceOfInputs(WithBuffer):
    """Checkpointed layers have their inputs in one buffer, one after the other."""

    no_oracle = "where a layer is masked it is not computed again, and the check sees no write by a pointer"

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(partial(self._through, self.one), x, use_reentrant=False)
        return checkpoint(partial(self._through, self.layer), torch.tanh(hidden), use_reentrant=False)

    def _through(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(self.buffer.fill(x))


# --- uses that begin later, and gradients in the loss --------------------------------------------------------------


class LayersInLoss(TwoLayers):
    """Two layers whose activation or weight the loss asks for. ``way`` may have them in a checkpoint."""

    ways = ("", "checkpointed")
    later = True

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = x = x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        if self.way == "checkpointed":
            return x + checkpoint(self._through, x, use_reentrant=False)
        return x + self._through(x)

    def _through(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.one(x)))

    def term(self, loss: Tensor, output: Tensor) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if not self.hostile or not loss.requires_grad or hidden is None or not hidden.requires_grad:
            return loss
        return self.changed(loss, output, hidden)

    def end(self) -> None:
        self.hidden = None  # a copy of the model has no graph

    def changed(self, loss: Tensor, output: Tensor, hidden: Tensor) -> Tensor:
        """Return the loss with a gradient in it. ``hidden`` is the layers' input."""
        raise NotImplementedError


@hostile
class ActivationInLoss(LayersInLoss):
    """The loss is scaled by the norm of its gradient by an activation."""

    def changed(self, loss: Tensor, output: Tensor, hidden: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        return loss * (1 + gradient.norm().detach())


@hostile
class WeightInLoss(LayersInLoss):
    """Two terms of the loss are balanced by their gradients by a weight."""

    ways = ("", "unused", "graph", "checkpointed")
    no_oracle = "torch.autograd.grad by a weight raises where the weight is masked"

    def changed(self, loss: Tensor, output: Tensor, hidden: Tensor) -> Tensor:
        if not self.layer.weight.requires_grad:
            return loss
        size = output.abs().mean()
        if self.way == "graph":
            (gradient,) = torch.autograd.grad(size, self.layer.weight, create_graph=True)
            return loss + gradient.square().sum()
        norms = [self._norm(term) for term in (loss, size)]
        return loss + (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4).detach() * size

    def _norm(self, term: Tensor) -> Tensor:
        unused = self.way == "unused"
        (gradient,) = torch.autograd.grad(term, self.layer.weight, retain_graph=True, allow_unused=unused)
        return torch.zeros(()) if gradient is None else gradient.norm()


@hostile
class PenaltyInLoss(LayersInLoss):
    """The loss has a gradient in it that is differentiated again."""

    def changed(self, loss: Tensor, output: Tensor, hidden: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        return loss + gradient.square().mean()


@hostile
class BackwardInLoss(LayersInLoss):
    """The loss function runs another backward, which names the parameters that it accumulates into."""

    no_oracle = "a backward that names a weight raises where the weight is masked"

    def changed(self, loss: Tensor, output: Tensor, hidden: Tensor) -> Tensor:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if trained:
            (0.1 * output.square().mean()).backward(inputs=trained, retain_graph=True)
        return loss


@hostile
class PenaltyInForward(LayersInLoss):
    """The forward has a gradient in it that is differentiated again."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        hidden, self.hidden = self.hidden, None
        if self.hostile and hidden is not None and output.requires_grad:
            (gradient,) = torch.autograd.grad(torch.tanh(output).square().sum(), hidden, create_graph=True)
            output = output + 0.1 * gradient
        return output


@hostile
class WeightElsewhere(Part):
    """A layer's weight is also used outside of its forward, or in the loss."""

    ways = ("product", "norm", "loss")
    later = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.hostile and self.way == "product":
            return torch.tanh(y) @ self.layer.weight
        return y + self.layer.weight.square().mean() if self.hostile and self.way == "norm" else y

    def term(self, loss: Tensor, output: Tensor) -> Tensor:
        return loss + self.layer.weight.square().mean() if self.hostile and self.way == "loss" else loss


@hostile
class LinearReplaced(Part):
    """``torch.nn.functional.linear`` is replaced by one that rounds its input."""

    later = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.hostile:
            return self.layer(x)
        with patch.object(F, "linear", rounded):
            return self.layer(x)


# --- the gradient is needed in its own microbatch's backward -------------------------------------------------------


@hostile
class JointClip(TwoLayers):
    """A hook on several gradients clips those of each microbatch by their joint norm."""

    no_oracle = "the norm is that of the gradients that are not masked"

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        torch.autograd.graph.register_multi_grad_hook([*self.one.parameters(), self.layer.weight], self._clip)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.one(x)))

    def _clip(self, gradients: Any) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        if present:
            norm = torch.stack([gradient.norm() for gradient in present]).norm()
            for gradient in present:
                gradient.mul_((0.01 / norm).clamp(max=1.0))


ACCUMULATED = ("AccumulatedClamp", "OptimizerInBackward")
"""Parts with a hook that runs after a gradient is accumulated. Torch runs none in split backwards."""


class NotesSize(Part):
    """A hook on the output notes the size of its gradient, for a hook on the weight that runs in the same backward."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        if output.requires_grad:
            output.register_hook(self._note)
        return x + output

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.size = torch.ones(())

    def _note(self, gradient: Tensor) -> None:
        self.size = gradient.detach().norm()


@hostile
class WeightHook(NotesSize):
    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.layer.weight.register_hook(self._scale)

    def _scale(self, gradient: Tensor) -> Tensor:
        return gradient / (self.size + 1e-3)


@hostile
class AccumulatedClamp(NotesSize):
    no_oracle = "it clamps the sum over the microbatches so far"

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.layer.weight.register_post_accumulate_grad_hook(self._clamp)

    def _clamp(self, weight: Tensor) -> None:
        assert weight.grad is not None
        most = 0.1 * self.size
        weight.grad.clamp_(-most, most)


@hostile
class OptimizerInBackward(Part):
    """The layer has an optimizer of its own, which steps as soon as a gradient is accumulated."""

    later = True
    no_oracle = "its weights change within the batch"

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.values = self.layer.weight.data  # whose changes torch does not count
        self.optimizer = torch.optim.SGD([self.values], lr=0.1)
        self.layer.weight.register_post_accumulate_grad_hook(self._update)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def _update(self, weight: Tensor) -> None:
        if self.hostile:
            self.values.grad, weight.grad = weight.grad, None
            self.optimizer.step()


# --- a layer computes another product, or none ---------------------------------------------------------------------


@hostile
class NoGradient(TwoLayers):
    """A layer's output gets None as its gradient. Its weight has no gradient then, and AdamW does not move it."""

    later = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.tanh(x)) + Stop.apply(self.one(x), self.hostile)


@hostile
class ZeroScale(TwoLayers):
    """Gradients are all zero in the first step, since a residual branch begins at 0."""

    ways = ("", "rounded", "penalty")

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "rounded":
            with patch.object(F, "linear", rounded):
                return x + self.scale * self._branch(x)
        if self.way == "":
            return x + self.scale * self._branch(x)
        inputs = x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        output = self._branch(inputs)
        if output.requires_grad:
            (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            output = output + 0.1 * gradient
        return x + self.scale * output

    def _branch(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.one(x)))


@hostile
class TypeLoop(Part):
    """After each update, code that asks for a layer's exact type clips its weight."""

    def build(self, draw: random.Random) -> None:
        super().build(draw)
        self.layer = nn.Sequential(self.layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def end(self) -> None:
        with torch.no_grad():
            for module in self.modules():
                if type(module) is nn.Linear:
                    module.weight.clamp_(-0.1, 0.1)
