"""Compare both graphs of a compiled block, bit by bit: outputs, and the gradients of inputs and parameters.

Each graph runs forward and backward on copies of one call's arguments, with the same random numbers. What the module
has changed meanwhile, such as its buffers, is put back after each. The gradients of outputs are random, so that no
gradient is zero. The check also looks who else uses a weight of the block: a graph that runs for training must be the
only one that leads to the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from tf_adapters.weight_gradients.kept import Kept, seal
from tf_adapters.weight_gradients.reasons import ANOTHER_GRADIENT, OTHER_USES, UNPROVEN
from tf_adapters.weight_gradients.tap_check import differs
from tf_adapters.weight_gradients.tapped_layer import TappedLayer

_SEED = 1


class Product(NamedTuple):
    """What a tap has kept of one product with ``weight``."""

    weight: torch.Tensor
    inputs: Kept
    gradient: Kept


class _Result(NamedTuple):
    """What a graph has computed: its outputs, and the gradients of its inputs and of the parameters, by parameter."""

    values: list[torch.Tensor | None]
    gradients: dict[torch.Tensor, torch.Tensor | None]


def compare(
    module: torch.nn.Module,
    call: partial[Any],
    *,
    ours: Callable[..., Any],
    products: list[Product],
    weights: Mapping[torch.Tensor, TappedLayer],
) -> str | None:
    """Run the host's ``call`` and ``ours`` on the same values. Return why the block must be left to the host.

    ``products`` receives what the taps keep in the backward of ``ours``.
    """
    host = _run(module, call)
    products.clear()
    tapped = _run(module, partial(ours, *call.args, **call.keywords))
    seal(kept for product in products for kept in (product.inputs, product.gradient))
    if any(tapped.gradients[weight] is not None for weight in weights):
        return OTHER_USES
    for product in products:
        layer, weight = weights[product.weight], product.weight
        (gradient,) = layer.gradients((weight,), product.inputs.tensor, product.gradient.tensor)  # type: ignore[arg-type]
        before = tapped.gradients[weight]
        tapped.gradients[weight] = gradient if before is None else before + gradient
    theirs, own = [*host.values, *host.gradients.values()], [*tapped.values, *tapped.gradients.values()]
    if len(theirs) != len(own) or not all(map(_same, theirs, own)):
        return ANOTHER_GRADIENT
    return None if all(_says_something(host.gradients[weight]) for weight in weights) else UNPROVEN


def _run(module: torch.nn.Module, call: partial[Any]) -> _Result:
    with _put_back(module), torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):  # no checkpoint's
        args, kwargs = tree_map(_copy, (call.args, call.keywords))
        outputs = [value for value in tree_leaves(call.func(*args, **kwargs)) if isinstance(value, torch.Tensor)]
        trained = [output for output in outputs if output.requires_grad]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        values = [output.detach().clone() for output in outputs]
        wanted = [*inputs, *parameters]
        found = torch.autograd.grad(trained, wanted, list(_gradients(trained)), allow_unused=True)
    of_parameters: dict[torch.Tensor, torch.Tensor | None] = dict(zip(parameters, found[len(inputs) :], strict=True))
    return _Result([*values, *found[: len(inputs)]], of_parameters)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _gradients(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    for output in outputs:
        yield torch.randn(output.shape, generator=generator).to(output)


@contextmanager
def _put_back(module: torch.nn.Module) -> Iterator[None]:
    """Restore random numbers, buffers and attributes of a module on exit."""
    attributes = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    device = next(module.parameters()).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for part, own, buffers in attributes:
            vars(part).clear()
            vars(part).update(own)
            part._buffers.clear()
            part._buffers.update(buffers)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else not differs(one, other)


def _says_something(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def uses(roots: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> Counter[torch.Tensor]:
    """Count the functions in the graph behind ``roots`` that lead to each of these weights."""
    nodes = {torch.autograd.graph.get_gradient_edge(weight).node: weight for weight in weights}
    found: Counter[torch.Tensor] = Counter()
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        following = {edge for edge, _ in getattr(node, "next_functions", ())}
        found.update(nodes[other] for other in following if other in nodes)
        waiting += following - seen
        seen |= following
    return found
