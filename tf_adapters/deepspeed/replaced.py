"""Find schedules and transfers of other projects that an order of ours would replace.

A project may give DeepSpeed's engine other instructions, or another order of them. For example, it may load data before
transfers, because its loader communicates. An order of ours would drop such changes.
Source: deepspeed/runtime/pipe/schedule.py, engine.py and p2p.py.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import lru_cache
from types import ModuleType
from typing import Any

from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as host

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.deepspeed.schedules import own_schedule
from tf_adapters.hosts.support import Problem, foreign_module, module_of

_TRANSFERS = (host.SendActivation, host.RecvActivation, host.SendGrad, host.RecvGrad)


def replaced_problem(engine: Any, settings: TimelyFreezeConfig) -> Problem:
    """Return a problem if the settings would leave out what another project does in the engine."""
    backward = _replaced_backward(engine) if settings.splits_backwards else None
    if backward:
        return (
            f"{backward} is not DeepSpeed's own, and it may use each microbatch's whole gradient; "
            f"use {settings.without_split}"
        )
    reorders = settings.defers and not engine.dynamic_shape
    if not reorders and settings.schedule == "host":
        return None
    found = _replaced(engine)
    asked = f'schedule "{settings.schedule}"' if settings.schedule != "host" else 'weight_gradients "deferred"'
    return found and (
        f"{found} is not DeepSpeed's own, and {asked} would run without what it does; "
        'use schedule "host" and weight_gradients "in_place"'
    )


def _replaced_backward(engine: Any) -> str | None:
    """Return the name of the engine's instruction for a backward, if another project has replaced it."""
    module = foreign_module(engine._INSTRUCTION_MAP.get(host.BackwardPass), ("deepspeed",))
    return module and f"the engine's BackwardPass ({module})"


def _replaced(engine: Any) -> str | None:
    """Return the name of the first function of DeepSpeed that another project has replaced, or None."""
    schedule = own_schedule(engine)
    functions = {
        "_exec_schedule": engine._exec_schedule,
        **{kind.__name__: engine._INSTRUCTION_MAP.get(kind) for kind in _TRANSFERS},
        "p2p.send": p2p.send,
        "p2p.recv": p2p.recv,
    }
    if not _streams_as_written(schedule, engine.micro_batches, engine.num_stages):
        return f"the order of the engine's instructions ({schedule.__name__}.steps of {schedule.steps.__module__})"
    modules = {name: module_of(function) for name, function in functions.items()}
    foreign = ((name, module) for name, module in modules.items() if module.split(".")[0] != "deepspeed")
    return next((f"the engine's {name} ({module})" for name, module in foreign), None)


def _streams_as_written(schedule: type[host.PipeSchedule], microbatches: int, stages: int) -> bool:
    """Return whether a schedule yields the instructions that DeepSpeed's source gives it, on each stage.

    It is compared with the class of DeepSpeed that it is or extends. That class may have been changed in this process,
    so the comparison uses a fresh copy of its module.
    """
    bases = [cls for cls in schedule.__mro__ if cls.__module__ == host.__name__ and not inspect.isabstract(cls)]
    written = getattr(_fresh_module(), bases[0].__name__, None) if bases else None
    return written is not None and all(
        _stream(schedule, microbatches, stages, stage) == _stream(written, microbatches, stages, stage)
        for stage in range(stages)
    )


def _stream(schedule: Any, microbatches: int, stages: int, stage: int) -> list[list[tuple[str, str]]]:
    """Return the classes of the instructions, step by step."""
    steps = schedule(micro_batches=microbatches, stages=stages, stage_id=stage).steps()
    return [[(type(given).__module__, type(given).__qualname__) for given in instructions] for instructions in steps]


@lru_cache(1)
def _fresh_module() -> ModuleType:
    """Load DeepSpeed's schedules from their file again."""
    module = importlib.util.module_from_spec(host.__spec__)
    host.__spec__.loader.exec_module(module)
    return module
