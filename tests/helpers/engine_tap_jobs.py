"""Transformer Engine's layers with their weight gradients computed later, next to the layers alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import torch

from tf_adapters.weight_gradients.engine_taps import engine_layer
from tf_adapters.weight_gradients.taps import StageTaps

WIDTH, TOKENS, SPLITS, MICROBATCHES = 8, 10, [4, 0, 6], 3


def layer(kind: str, **settings: Any) -> Any:
    import transformer_engine.pytorch as te

    if kind == "GroupedLinear":
        return te.GroupedLinear(len(SPLITS), WIDTH, WIDTH, **settings)
    return getattr(te, kind)(WIDTH, WIDTH, **settings)


def trained(model: Any, kind: str, taps: StageTaps | None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The gradients after each microbatch's last part, and how often each parameter's hook ran."""
    generator, seen, hooks = torch.Generator().manual_seed(3), [], dict.fromkeys(dict(model.named_parameters()), 0)
    for name, parameter in model.named_parameters():

        def count(parameter: torch.nn.Parameter, name: str = name) -> None:
            hooks[name] += 1

        count.__module__ = "megatron.core"  # a layer with hooks of the user's would have no tap
        parameter.register_post_accumulate_grad_hook(count)
    for microbatch in range(MICROBATCHES):
        x = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
        args = (SPLITS,) if kind == "GroupedLinear" else ()
        if taps is None:
            model(x, *args).square().sum().backward()
        else:
            with taps.recording(microbatch):
                model(x, *args).square().sum().backward()
            before = {name: total(p) for name, p in model.named_parameters() if name in taps.names}
            if microbatch == 0:
                assert all(value is None or not value.any() for value in before.values()), before
            taps.compute(microbatch)
        seen.append({"input": x.grad, **{name: total(p) for name, p in model.named_parameters()}})
    return seen, hooks


def total(parameter: Any) -> Any:
    value = parameter.main_grad if getattr(parameter, "grad_added_to_main_grad", False) else parameter.grad
    return None if value is None else value.clone()


def check(kind: str, fused: bool, bias: bool) -> tuple[list[str], list[str], bool]:
    """Names of what differs in a bit; those that can wait; whether all is put back."""
    torch.manual_seed(1)
    ours = layer(kind, fuse_wgrad_accumulation=fused, bias=bias)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if fused and "weight" in name and "norm" not in name:
                parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    before = dict(vars(ours))
    taps = StageTaps(ours, engine_layer, trusted=True)
    taps.install()
    apart, their_hooks = trained(ours, kind, taps), trained(theirs, kind, None)
    taps.remove()
    differ = [
        f"{number} {name}"
        for number, (mine, other) in enumerate(zip(apart[0], their_hooks[0], strict=True))
        for name in mine
        if not torch.equal(mine[name], other[name])
    ]
    differ += [f"hook of {name}" for name, times in apart[1].items() if times != MICROBATCHES]
    same = ours.wgrad_store is before["wgrad_store"] and type(ours) is type(theirs)
    return differ, sorted(taps.names), same


def checked_step() -> dict[str, str]:
    """What a checked step finds out about a layer that was called, and one that was not."""
    model = torch.nn.ModuleDict({"used": layer("Linear"), "unused": layer("Linear")})
    taps = StageTaps(model, engine_layer)
    taps.install()
    with taps.checking(0):
        model["used"](torch.randn(TOKENS, WIDTH)).sum().backward()
    return taps.end_check()


def quantizing_step(recipe: str, sampled: bool) -> dict[str, str]:
    """What a checked step finds out about a layer that computes in FP8 with this recipe."""
    from transformer_engine.common import recipe as recipes

    model = torch.nn.ModuleDict({"used": layer("Linear")})
    taps = StageTaps(model, partial(engine_layer, sampled=sampled))
    taps.install()
    of_layer = mock.patch("tf_adapters.weight_gradients.engine_taps._recipe", return_value=getattr(recipes, recipe)())
    with taps.checking(0), of_layer:
        model["used"](torch.randn(TOKENS, WIDTH)).sum().backward()
    return taps.end_check()


def first_microbatch_last() -> float:
    """The error in ``main_grad`` where the first microbatch, which writes over what is there, is computed last."""
    model, inputs = layer("Linear", fuse_wgrad_accumulation=True, bias=False), torch.randn(2, TOKENS, WIDTH)
    model.weight.main_grad, model.weight.grad_added_to_main_grad = torch.zeros(WIDTH, WIDTH), False
    taps = StageTaps(model, engine_layer, trusted=True)
    taps.install()
    for microbatch, x in enumerate(inputs):
        with taps.recording(microbatch):
            model(x, is_first_microbatch=microbatch == 0).sum().backward()
    for microbatch in (1, 0):
        taps.compute(microbatch)
    expected = torch.ones(WIDTH, 1) @ inputs.reshape(-1, WIDTH).sum(dim=0, keepdim=True)
    return (model.weight.main_grad - expected).abs().max().item()
