"""What an attached adapter may leave behind: on a host's objects, in the process, and in memory."""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import megatron_patches
from tf_adapters.report import observer

State = dict[str, dict[str, Any]]
"""By the name of an object, its attributes, hooks and flags."""


def state_of(objects: Mapping[str, Any]) -> State:
    """Of each object of a host, with the modules and parameters in it. A container's entries are taken one by one."""
    state = {name: _attributes(part) for name, part in parts_of(objects)}
    return {**state, "process": process()}


def parts_of(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in objects.items():
        if not isinstance(value, torch.nn.Module):
            yield name, value
            continue
        yield from ((f"{name}: {part}", module) for part, module in value.named_modules())
        yield from ((f"{name}: {part}", parameter) for part, parameter in value.named_parameters())


def process() -> dict[str, Any]:
    """What a process has one of."""
    return {
        "groups": list(dist.distributed_c10d._world.pg_map),
        "patches": [patch.path for patch in megatron_patches.patches() if patch.applied],
        "exit functions": atexit._ncallbacks(),
        "reports": dict(observer._newest),
        "threads": {thread.name for thread in threading.enumerate()},
    }


def differences(before: State, after: State) -> list[str]:
    """Where two states of the same objects differ."""
    found = list(before.keys() ^ after.keys())
    for name in before.keys() & after.keys():
        then, now = before[name], after[name]
        found += [f"{name}.{key}" for key in then.keys() | now.keys() if not _same(then.get(key), now.get(key))]
    return sorted(found)


def names_in(state: State) -> dict[str, Any]:
    """What two runs of the same host have in common: names of attributes, numbers of hooks, flags."""

    def shown(key: str, value: Any) -> Any:
        return len(value) if "hooks" in key else value if key == "requires_grad" else None

    return {name: {key: shown(key, value) for key, value in of.items()} for name, of in state.items()}


def references(objects: Mapping[str, Any]) -> dict[str, weakref.ref[Any]]:
    return {name: weakref.ref(part) for name, part in parts_of(objects)}


def alive(references: Mapping[str, weakref.ref[Any]]) -> list[str]:
    """What still lives, once nobody needs it any more."""
    for _ in range(3):
        gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def _attributes(part: Any) -> dict[str, Any]:
    found = {key: _entries(value) for key, value in vars(part).items()}
    if isinstance(part, torch.Tensor):
        found |= {"requires_grad": part.requires_grad, "backward hooks": list((part._backward_hooks or {}).items())}
        found["accumulating hooks"] = list((part._post_accumulate_grad_hooks or {}).items())
    return found


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if isinstance(value, (list, set, tuple)) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)) and type(before) is type(after):
        return len(before) == len(after) and all(map(_same, before, after))
    equal_values = isinstance(before, (str, int, float, bytes, type(None), set, dict)) and before == after
    return before is after or equal_values
