"""Everything that a module holds besides its values: freezing must leave it as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def traces(model: nn.Module) -> dict[str, Any]:
    """By module and parameter: attributes, classes, hooks, ``requires_grad``; and what torch holds for all modules."""
    of_torch = vars(nn.modules.module)
    found: dict[str, Any] = {
        "torch": {
            "linear": (id(nn.functional.linear), id(nn.Linear.forward), id(nn.Module.__call__)),
            "hooks": {n: len(v) for n, v in of_torch.items() if n.startswith("_global") and hasattr(v, "__len__")},
            "torch_function_modes": torch._C._len_torch_function_stack(),
        }
    }
    for name, module in model.named_modules():
        held = vars(module)
        found[f"module {name}"] = {
            "class": type(module),
            "attributes": sorted(held),
            "hooks": {hooks: [id(hook) for hook in (held[hooks] or {}).values()] for hooks in _HOOKS},
            "functions": {n: id(v) for n, v in held.items() if callable(v)},
            "children": {n: id(child) for n, child in module.named_children()},
            "parameters": {n: id(p) for n, p in module._parameters.items()},
        }
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = {
            "class": type(parameter),
            "requires_grad": parameter.requires_grad,
            "attributes": sorted(vars(parameter)),
            "hooks": len(parameter._backward_hooks or ()),
            "accumulated": len(parameter._post_accumulate_grad_hooks or ()),
        }
    return found


def traces_of_host(run: Any) -> Any:
    """Names of the functions that the host's objects hold of their own."""
    stages = [vars(stage) for stage in stage_list(run.schedule)]
    return {
        "functions of stages": [sorted(n for n, v in held.items() if callable(v)) for held in stages],
        "functions of the schedule": sorted(n for n, v in vars(run.schedule).items() if callable(v)),
        "timely_freeze": hasattr(run.schedule, "timely_freeze"),
    }


def stage_list(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def changes(before: Any, after: Any) -> list[str]:
    """Where two traces differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after}, key=str)
        return [f"{key}: {text}" for key in keys for text in changes(before.get(key, "-"), after.get(key, "-"))]
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)) and len(before) == len(after):
        return [text for pair in zip(before, after, strict=True) for text in changes(*pair)]
    return [] if before == after else [f"was {before!s:.100}, is {after!s:.100}"]
