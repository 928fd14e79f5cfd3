"""The situations of ``hostile``, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from hostile import WIDTH, Block, Situation, Tensor, Verdict
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

# --- something changes what the product is computed from -------------------------------------------------------------


class StolenGradient(Situation):
    """A learned position takes the output's gradient as its own. Later microbatches add to it in place."""

    def build(self, block: Block) -> None:
        block.position = nn.Parameter(0.1 * torch.randn(self.rows, WIDTH))

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return block.through_b(torch.tanh(block.through_a(x))) + block.position.view(x.shape)


def in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def through_data(gradient: Tensor) -> None:
    gradient.data.mul_(0.5)


def through_numpy(gradient: Tensor) -> None:
    gradient.detach().numpy()[...] *= 0.5  # torch's count of changes does not see it


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


class ChangedInPlace(Situation):
    """A Function scales its gradient in place; it is also the gradient of a layer's output."""

    def __init__(self, *args: Any, change: Callable[[Tensor], None] = in_place, begins: int = 0, **given: Any) -> None:
        super().__init__(*args, **given)
        self.change, self.begins = change, begins

    def forward(self, block: Block, x: Tensor) -> Tensor:
        hidden = torch.tanh(block.through_a(x))
        hidden = Changed.apply(hidden, self.change if self.hostile else id)
        return hidden + block.through_b(hidden.detach())


class ChangedByHook(Situation):
    """A hook of one layer's output clamps the gradient in place; it is also the gradient of another layer's output."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        one = block.through_a(x)
        if one.requires_grad:
            one.register_hook(lambda gradient: gradient.clamp_(-0.01, 0.01))
        return one + block.through_b(x)


class NormInPlace(torch.autograd.Function):
    """A norm whose backward writes into its incoming gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        of_input = scale * (gradient - x * scale * (gradient * x * scale).mean(-1, keepdim=True))
        return gradient.copy_(of_input)


class InPlaceBranch(Situation):
    """A norm writes into its gradient, which is also the gradient of another branch's output."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        for layer in (block.through_a, block.through_b):
            x = NormInPlace.apply(x) + layer(x)
        return x


class StaticInput(Situation):
    """A layer's input is copied into a buffer of a pool. The microbatch's backward gives the buffer back."""

    def build(self, block: Block) -> None:
        block.pool = []

    def forward(self, block: Block, x: Tensor) -> Tensor:
        one = block.through_a(x)
        buffer = block.pool.pop() if block.pool else torch.zeros(self.rows, WIDTH)
        with torch.no_grad():
            self.fill(buffer, x)
        if one.requires_grad:  # its gradient comes after the other layer's
            one.register_hook(lambda gradient: block.pool.append(buffer))
        return torch.tanh(one) + block.through_b(buffer).view(x.shape)

    def fill(self, buffer: Tensor, x: Tensor) -> None:
        buffer.copy_(x.reshape(buffer.shape))


class StaticInputThroughNumpy(StaticInput):
    """The same, where torch's count of changes does not see the copy."""

    def fill(self, buffer: Tensor, x: Tensor) -> None:
        buffer.numpy()[...] = x.detach().reshape(buffer.shape).numpy()


class Into(torch.autograd.Function):
    """Half of the input. The backward writes its gradient into a workspace and returns that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workspace: Tensor) -> Tensor:
        ctx.workspace = workspace
        return 0.5 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.mul(gradient, 0.5, out=ctx.workspace.view(gradient.shape)), None


class StaticGradient(Situation):
    """The gradient of a layer's output is in a buffer that each microbatch fills again."""

    def build(self, block: Block) -> None:
        block.workspace = torch.zeros(self.rows, WIDTH)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return Into.apply(block.through_b(torch.tanh(block.through_a(x))), block.workspace)


class Workspace(StaticGradient):
    """The gradients of two layers' outputs are in one workspace, one after the other."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        hidden = Into.apply(block.through_a(x), block.workspace)
        return x + Into.apply(block.through_b(torch.tanh(hidden)), block.workspace)


class WorkspaceOfInputs(StaticGradient):
    """Checkpointed layers have their inputs in one workspace, one after the other."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        hidden = checkpoint(partial(self._through, block, block.through_a), x, use_reentrant=False)
        return checkpoint(partial(self._through, block, block.through_b), torch.tanh(hidden), use_reentrant=False)

    def _through(self, block: Block, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        block.workspace.copy_(x.detach().reshape(block.workspace.shape))
        return x + layer(block.workspace).view(x.shape)


class TwoCheckpoints(Situation):
    """Two checkpointed parts call the same layers. Each part's own backward accumulates their gradients."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        run = lambda hidden: hidden + block.through_b(torch.tanh(block.through_a(hidden)))  # noqa: E731
        hidden = x if x.requires_grad else x.detach().requires_grad_()
        for _ in range(2):
            hidden = checkpoint(run, hidden, use_reentrant=True)
        return hidden


# --- more is asked of autograd than the product ----------------------------------------------------------------------


class GradientInLoss(Situation):
    """The loss is scaled by the norm of its gradient by an activation."""

    def __init__(self, *args: Any, begins: int = 0, **given: Any) -> None:
        super().__init__(*args, **given)
        self.begins = begins

    def forward(self, block: Block, x: Tensor) -> Tensor:
        block.hidden = torch.tanh(block.through_a(x))
        return x + block.through_b(block.hidden)

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        if not self.hostile or not loss.requires_grad:
            return loss
        (gradient,) = torch.autograd.grad(loss, self.blocks[-1].hidden, retain_graph=True)
        return loss * (1 + gradient.norm().detach())


class GradientInLossOfCheckpointed(GradientInLoss):
    """The same, of the input of a checkpointed part."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        block.hidden = x if x.requires_grad else x.detach().requires_grad_()
        run = lambda hidden: block.through_b(torch.tanh(block.through_a(hidden)))  # noqa: E731
        return x + checkpoint(run, block.hidden, use_reentrant=False)


class GradientInLossOfLongCheckpointed(GradientInLossOfCheckpointed):
    """The same with as many rows as features: a gradient of a weight has the shape of an activation."""

    shape = (WIDTH,)

    def __init__(self, rows: int = WIDTH, *args: Any, **given: Any) -> None:
        super().__init__(rows, *args, **given)


class Penalty(GradientInLoss):
    """A gradient penalty: the loss has a gradient in it that is differentiated again."""

    verdict = Verdict.LOUD

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        if not self.hostile or not loss.requires_grad:
            return loss
        (gradient,) = torch.autograd.grad(output.square().sum(), self.blocks[-1].hidden, create_graph=True)
        return loss + gradient.square().mean()


class PenaltyFromTheStart(Penalty):
    verdict = Verdict.LEFT


class PenaltyInForward(Situation):
    """The same inside the forward."""

    verdict = Verdict.LEFT

    def forward(self, block: Block, x: Tensor) -> Tensor:
        inputs = x if x.requires_grad else x.detach().requires_grad_()
        output = block.through_b(torch.tanh(block.through_a(inputs)))
        if self.hostile and output.requires_grad:
            (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            output = output + gradient
        return output


class PenaltyInFirstBatch(PenaltyInForward):
    """The same in the first of each update's two batches."""

    batches = 2

    @property
    def hostile(self) -> bool:
        return self.batch == 0


class BackwardWithInputs(Situation):
    """The loss function runs another backward, which names the parameters that it accumulates into."""

    verdict, begins = Verdict.LOUD, 1

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        if self.hostile and loss.requires_grad:
            extra = 0.1 * output.square().mean()
            extra.backward(inputs=list(self.blocks[-1].parameters()), retain_graph=True)
        return loss


class GradientOfWeight(GradientInLoss):
    """Two terms of the loss are balanced by their gradients by a weight."""

    verdict = Verdict.LOUD

    def __init__(self, *args: Any, unused: bool = False, **given: Any) -> None:
        super().__init__(*args, **given)
        self.unused = unused

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        if not self.hostile or not loss.requires_grad:
            return loss
        size = output.abs().mean()
        gradients = []
        for term in (loss, size):
            weight = self.blocks[-1].b.weight
            gradients += torch.autograd.grad(term, weight, retain_graph=True, allow_unused=self.unused)
        one, other = (torch.zeros(()) if gradient is None else gradient.norm() for gradient in gradients)
        return loss + (one / (other + 1e-4)).clamp(0, 1e4).detach() * size


class GradientOfWeightFromTheStart(GradientOfWeight):
    verdict = Verdict.LEFT


class AskedInForward(Situation):
    """The forward scales its output by the gradients of its weights, which ``ask`` returns."""

    verdict, begins = Verdict.LOUD, 2

    def __init__(self, *args: Any, ask: Callable[[Tensor, Block], Tensor], begins: int = 2, **given: Any) -> None:
        super().__init__(*args, **given)
        self.ask, self.begins = ask, begins

    def forward(self, block: Block, x: Tensor) -> Tensor:
        output = block.through_b(torch.tanh(block.through_a(x)))
        if self.hostile and output.requires_grad:
            output = output * (1 + self.ask(output.square().mean(), block))
        return output


def by_grad(value: Tensor, block: Block) -> Tensor:
    weights = [block.a.weight, block.b.weight]
    found = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    return sum(torch.zeros(()) if gradient is None else gradient.norm() for gradient in found)  # type: ignore[return-value]


def by_grad_with_graph(value: Tensor, block: Block) -> Tensor:
    (gradient,) = torch.autograd.grad(value, block.b.weight, create_graph=True)
    return gradient.square().mean()


def by_backward(value: Tensor, block: Block) -> Tensor:
    value.backward(inputs=[block.b.weight], retain_graph=True)
    return torch.zeros(())


class Stop(torch.autograd.Function):
    """The input. The backward returns no gradient while ``stops``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stops: bool) -> Tensor:
        ctx.stops = stops
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.stops else gradient, None


class NoGradient(GradientInLoss):
    """A layer's output gets None as its gradient. Its weight has no gradient then, and AdamW does not move it."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return x + block.through_b(torch.tanh(x)) + Stop.apply(block.through_a(x), self.hostile)

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        return loss


# --- the gradient is needed in its own microbatch's backward ---------------------------------------------------------


class MultiGradHook(Situation):
    """A hook on several gradients clips those of each microbatch by their joint norm."""

    verdict = Verdict.LEFT

    def prepare(self) -> None:
        for block in self.blocks:
            torch.autograd.graph.register_multi_grad_hook(list(block.parameters()), self._clip)

    def _clip(self, gradients: Any) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        norm = torch.stack([gradient.norm() for gradient in present]).norm()
        for gradient in present:
            gradient.mul_((0.01 / norm).clamp(max=1.0))


class WeightHook(Situation):
    """A hook on a weight's gradient reads what the same backward has noted."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        output = block.through_b(torch.tanh(block.through_a(x)))
        if output.requires_grad:
            output.register_hook(partial(self._note, block))
        return x + output

    def _note(self, block: Block, gradient: Tensor) -> None:
        block.size = gradient.norm()

    def prepare(self) -> None:
        for block in self.blocks:
            block.b.weight.register_hook(lambda gradient, block=block: gradient / block.size)


class AccumulatedHook(WeightHook):
    """A hook that runs after a gradient is accumulated reads what the same backward has noted."""

    def prepare(self) -> None:
        for block in self.blocks:
            block.b.weight.register_post_accumulate_grad_hook(partial(self._clamp, block))

    def _clamp(self, block: Block, weight: Tensor) -> None:
        weight.grad.clamp_(-block.size, block.size)


class StepInBackward(Situation):
    """Hooks update each weight in the backward. The learning rate is 0 in the first step."""

    verdict, begins = Verdict.LEFT, 1

    def prepare(self) -> None:
        for block in self.blocks:
            for parameter in block.parameters():
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.3 if self.hostile else 0.0)
        parameter.grad = None


# --- a layer computes another product --------------------------------------------------------------------------------


def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None, own: Any = F.linear) -> Tensor:
    """A linear layer of an input that is rounded, as training for quantized weights does."""
    return own(x + ((x * 4).round() / 4 - x).detach(), weight, bias)  # type: ignore[no-any-return]


def rounded_layer(self: nn.Linear, x: Tensor) -> Tensor:
    return rounded(x, self.weight, self.bias)


class ZeroFirstGradient(Situation):
    """Gradients are all zero in the first step, since a residual branch begins at 0. Its layers round their input."""

    verdict = Verdict.LEFT

    def build(self, block: Block) -> None:
        block.scale = nn.Parameter(torch.zeros(1))

    def prepare(self) -> None:
        self.around.enter_context(patch.object(nn.Linear, "forward", rounded_layer))

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return x + block.scale * block.through_b(torch.tanh(block.through_a(x)))


class ZeroFirstPenalty(ZeroFirstGradient):
    """The same. A gradient is differentiated inside the branch."""

    def prepare(self) -> None: ...

    def forward(self, block: Block, x: Tensor) -> Tensor:
        inputs = x if x.requires_grad else x.detach().requires_grad_()
        output = block.through_b(torch.tanh(block.through_a(inputs)))
        if output.requires_grad:
            (gradient,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            output = output + gradient
        return x + block.scale * output


class LinearReplaced(Situation):
    """``torch.nn.functional.linear`` is replaced in a later step by one that rounds its input."""

    verdict, begins = Verdict.LOUD, 2

    def begin(self, step: int, batch: int = 0) -> None:
        super().begin(step, batch)
        if step == self.begins and batch == 0:
            self.around.enter_context(patch.object(F, "linear", rounded))


class TypeIsLinear(Situation):
    """After each update, code that asks for a layer's exact type clips its weight."""

    def end(self) -> None:
        kind = type(self.layer())
        with torch.no_grad():
            for block in self.blocks:
                for module in block.modules():
                    if type(module) is kind:
                        module.weight.clamp_(-0.1, 0.1)


# --- all of them -----------------------------------------------------------------------------------------------------

SITUATIONS: dict[str, Callable[..., Situation]] = {
    "nothing hostile": Situation,
    "stolen gradient": StolenGradient,
    "gradient changed in place": ChangedInPlace,
    "gradient changed through data": partial(ChangedInPlace, change=through_data),
    "gradient changed through numpy": partial(ChangedInPlace, change=through_numpy),
    "gradient changed in place, from step 3": partial(ChangedInPlace, begins=2),
    "gradient changed by a hook": ChangedByHook,
    "norm in place next to a branch": InPlaceBranch,
    "static input": StaticInput,
    "static input through numpy": StaticInputThroughNumpy,
    "static gradient": StaticGradient,
    "workspace": Workspace,
    "workspace of inputs": WorkspaceOfInputs,
    "two checkpoints": TwoCheckpoints,
    "gradient in the loss": GradientInLoss,
    "gradient in the loss, from step 3": partial(GradientInLoss, begins=2),
    "gradient in the loss of a checkpoint": GradientInLossOfCheckpointed,
    "gradient in the loss of a checkpoint, from step 3": partial(GradientInLossOfCheckpointed, begins=2),
    "gradient in the loss of a long checkpoint": GradientInLossOfLongCheckpointed,
    "penalty": PenaltyFromTheStart,
    "penalty, from step 3": partial(Penalty, begins=2),
    "penalty in the forward": PenaltyInForward,
    "penalty in the first of two batches": PenaltyInFirstBatch,
    "backward with inputs": BackwardWithInputs,
    "gradient of a weight": GradientOfWeightFromTheStart,
    "gradient of a weight, unused": partial(GradientOfWeightFromTheStart, unused=True),
    "gradient of a weight, from step 3": partial(GradientOfWeight, begins=2),
    "gradient of a weight, unused, from step 3": partial(GradientOfWeight, unused=True, begins=2),
    "gradient of a weight in the forward, from step 3": partial(AskedInForward, ask=by_grad),
    "penalty by a weight in the forward, from step 3": partial(AskedInForward, ask=by_grad_with_graph),
    "backward with inputs in the forward, from step 3": partial(AskedInForward, ask=by_backward),
    "no gradient": NoGradient,
    "no gradient, from step 3": partial(NoGradient, begins=2),
    "multi-grad hook": MultiGradHook,
    "weight hook": WeightHook,
    "accumulated hook": AccumulatedHook,
    "step in the backward": StepInBackward,
    "zero first gradient": ZeroFirstGradient,
    "zero first gradient, penalty": ZeroFirstPenalty,
    "linear replaced": LinearReplaced,
    "type is Linear": TypeIsLinear,
}
