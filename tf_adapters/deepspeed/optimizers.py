"""Leave parameters that a whole step froze unchanged: no update, no decay, no change of optimizer state.

DeepSpeed replaces a missing gradient by zeros, and momentum and decay then still move the parameter.
Source: deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tf_adapters.deepspeed.partitions import flat_partitions, fragments
from tf_adapters.hosts.held_copies import HeldCopies
from tf_adapters.selection.sampling import HeldValues, ParameterPiece
from tf_adapters.training.step_masks import Scale

Part = tuple[int, int]
"""Start and end of a part of a partition."""

_BY_ELEMENT = {
    *(f"torch.optim.{name}" for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD", "adagrad.Adagrad", "rmsprop.RMSprop")),
    *(f"torch.optim.{name}" for name in ("adamax.Adamax", "nadam.NAdam", "radam.RAdam", "adadelta.Adadelta")),
    "deepspeed.ops.adam.fused_adam.FusedAdam",
}
"""Optimizers that are known to update each element independently of the others."""


class PartialSteps:
    """Lets steps of one optimizer skip parts of a flat partition, without a copy of these parts or of their state.

    The optimizer must update each element independently, so a view gets the same update as the whole. For one step,
    views of the other parts replace the partition in its parameter group. Each view has views of the gradient and the
    state. Call ``restore`` after each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced: list[tuple[dict[str, Any], list[torch.Tensor]]] = []  # groups, and their original parameters
        self._views: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def skip(self, flat: torch.Tensor, parts: Iterable[Part]) -> None:
        """Let the next step skip these parts of ``flat``, for which the optimizer has a state."""
        group = next(g for g in self._optimizer.param_groups if any(p is flat for p in g["params"]))
        views = [] if flat.grad is None else [self._view(flat, run) for run in _between(parts, flat.numel())]
        self._replaced.append((group, group["params"]))
        group["params"] = [view for p in group["params"] for view in (views if p is flat else [p])]
        self._views.append((flat, views))

    def restore(self) -> None:
        """Put the tensors back into their groups. State that counts for a whole tensor, such as ``step``, advances."""
        for group, parameters in reversed(self._replaced):
            group["params"] = parameters
        for flat, views in self._views:
            state = self._optimizer.state[flat]
            parts = [self._optimizer.state.pop(view) for view in views]
            for name, value in state.items():
                if not _by_element(value, flat):
                    state[name] = parts[-1][name] if parts else value + 1 if name == "step" else value
        self._replaced.clear()
        self._views.clear()

    def _view(self, flat: torch.Tensor, run: Part) -> torch.Tensor:
        start, length = run[0], run[1] - run[0]
        view = flat.detach().narrow(0, start, length)
        assert flat.grad is not None
        view.grad = flat.grad.narrow(0, start, length)
        self._optimizer.state[view] = {
            name: value.narrow(0, start, length)
            if _by_element(value, flat)
            else value.clone()
            if torch.is_tensor(value)
            else value
            for name, value in self._optimizer.state[flat].items()
        }
        return view


def _between(parts: Iterable[Part], length: int) -> Iterator[Part]:
    begin = 0
    for start, stop in [*sorted(parts), (length, length)]:
        if begin < start:
            yield begin, start
        begin = max(begin, stop)


def _by_element(value: Any, flat: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == flat.shape


class HeldParameters:
    """Leaves chosen parameters and their optimizer state unchanged through one optimizer step.

    With ZeRO stage 0 the inner optimizer gets no gradient for them. With flat fp32 partitions (ZeRO stage 1,
    BF16_Optimizer) its step skips their slices of the partition. If the optimizer does not update each element
    independently, slices and their state are saved before the step and restored after it. The step counter of a
    partition belongs to the whole partition and advances.
    """

    def __init__(self, engine: Any) -> None:
        self._outer = engine.optimizer
        self._inner: torch.optim.Optimizer = engine.basic_optimizer
        self.held: tuple[torch.nn.Parameter, ...] = ()  # the next steps leave these unchanged
        self._fragments = {} if self._outer is self._inner else fragments(self._outer)
        kind = type(self._inner)
        self._works_by_element = f"{kind.__module__}.{kind.__name__}" in _BY_ELEMENT
        self._kept = HeldCopies()
        self._partial = PartialSteps(self._inner)

    def before_step(self, *_: Any) -> None:
        """Exclude the held parameters from the inner optimizer's next step."""
        self.after_step()  # after a step that was cut off
        if self._outer is self._inner:
            for parameter in self.held:
                parameter.grad = None
            return
        for flat, parts in self._held_parts():
            if self._works_by_element and self._inner.state.get(flat):
                self._partial.skip(flat, parts)
            else:
                state = self._inner.state.get(flat, {}).values()
                updated = [flat.detach(), *(s for s in state if torch.is_tensor(s) and s.shape == flat.shape)]
                self._kept.keep(t.narrow(0, start, stop - start) for t in updated for start, stop in parts)

    def after_step(self, *_: Any) -> None:
        self._partial.restore()
        self._kept.put_back()

    def _held_parts(self) -> list[tuple[torch.Tensor, list[Part]]]:
        """Return this rank's slices of held parameters in each flat partition that the current step updates.

        ZeRO steps one parameter group at a time, and the inner optimizer then has only that group.
        """
        stepped = {id(p) for group in self._inner.param_groups for p in group["params"]}
        flats, parts = flat_partitions(self._outer), defaultdict[int, list[Part]](list)
        for parameter in self.held:
            fragment = self._fragments.get(id(parameter))
            if fragment is not None and id(flats[fragment.group]) in stepped:
                parts[fragment.group].append((fragment.start, fragment.start + fragment.numel))
        return [(flats[group], of_group) for group, of_group in parts.items()]


def held_values(engine: Any, parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> HeldValues:
    """Return a function that gives this rank's values of a parameter, by stage and name, as the optimizer updates them.

    With ZeRO stage 0 in fp32 these are the parameter itself. Otherwise they are its fragment of this rank's flat fp32
    partition, because bf16 weights would round small updates away. The fragment's start in the parameter identifies it.
    """

    is_flat = engine.optimizer is not engine.basic_optimizer
    of_rank = fragments(engine.optimizer) if is_flat else {}

    def held(stage: int, name: str) -> tuple[ParameterPiece, ...]:
        parameter = parameters[stage][name]
        if not is_flat:
            return (ParameterPiece(parameter),)
        fragment = of_rank.get(id(parameter))
        if fragment is None:  # other ranks update all of it
            return ()
        flat = flat_partitions(engine.optimizer)[fragment.group]
        return (ParameterPiece(flat.detach().narrow(0, fragment.start, fragment.numel), (fragment.begin,)),)

    return held


def fill_missing_gradients(optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set the gradient of parameters that have none in this step to zero.

    Every replica then reduces the same tensors, and every stage has a gradient for the norm.
    """
    if isinstance(optimizer, BF16_Optimizer):
        wanted = set(map(id, parameters))
        for group, index, parameter in _accumulated(optimizer):
            if id(parameter) in wanted:
                # The accumulation buffer holds zeros already. Without the mark, a stage without gradients fails in the
                # norm while other stages wait for it.
                optimizer.fp32_groups_has_gradients[group][index] = True
        return
    attribute = _gradient_attribute(optimizer)
    for parameter in parameters:
        if getattr(parameter, attribute, None) is None:
            setattr(parameter, attribute, torch.zeros_like(parameter, requires_grad=False))


def scale_gradients(optimizer: Any, scales: Iterable[Scale]) -> None:
    """Multiply the accumulated gradients of parameters by their scales, before the reduction."""
    if isinstance(optimizer, BF16_Optimizer):
        buffers = _accumulation_buffers(optimizer)
        scaled = ((buffers.get(id(parameter)), scale) for parameter, scale in scales)
    else:
        attribute = _gradient_attribute(optimizer)
        scaled = ((getattr(parameter, attribute, None), scale) for parameter, scale in scales)
    for gradient, scale in scaled:
        if gradient is not None:
            gradient.mul_(scale)


def _gradient_attribute(optimizer: Any) -> str:
    """Return the attribute in which a parameter's gradient is accumulated (not used by BF16_Optimizer)."""
    accumulates_apart = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute
    return "grad_accum" if accumulates_apart else "grad"


def fill_missing_tied_gradients(engine: Any) -> None:
    """Give tied weights the gradient that ReduceTiedGrads expects.

    Their stages draw different masks, so without a gradient one stage would skip the all-reduce in which the other
    waits. A weight that the user froze is frozen on all its stages. It gets no gradient, since AdamW would decay it.
    """
    for weight, _ in engine.module.get_tied_weights_and_groups():
        if engine.using_bf16_optimizer:
            if getattr(weight, "_hp_grad", None) is None:
                weight._hp_grad = _accumulation_buffers(engine.optimizer)[id(weight)] if weight.requires_grad else None
        elif weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight, requires_grad=False)


def _accumulation_buffers(optimizer: Any) -> dict[int, torch.Tensor]:
    """Return the accumulation buffers of a BF16_Optimizer, by ``id`` of the parameter."""
    return {id(p): optimizer.fp32_groups_gradients[group][index] for group, index, p in _accumulated(optimizer)}


def _accumulated(optimizer: Any) -> Iterator[tuple[int, int, torch.nn.Parameter]]:
    """Yield group, position and parameter of every parameter of a BF16_Optimizer."""
    for group, parameters in enumerate(optimizer.bf16_groups):
        for index, parameter in enumerate(parameters):
            yield group, index, parameter


@contextmanager
def accumulating(engine: Any) -> Iterator[None]:
    """Add weight gradients that are computed inside to the engine's accumulated gradients.

    An engine with a high-precision copy of the gradients adds the parameters' gradients to the copy after every
    backward. Gradients that the parameters have on entry were added already.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward = False
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.update_hp_grads(clear_lp_grads=False)
