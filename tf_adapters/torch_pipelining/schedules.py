"""Translate the action lists of torch.distributed.pipelining to our schedule.

Source: torch/distributed/pipelining/schedules.py. Its actions print as ours do. Actions that move
tensors, shard parameters or reduce gradients are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.distributed.pipelining import schedules as host

from tf_adapters.errors import UnsupportedError
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import one_forward_one_backward

_KINDS = {kind.value: kind for kind in Kind}


def stages_of(schedule: Any) -> tuple[Any, ...]:
    return (schedule._stage,) if isinstance(schedule, host.PipelineScheduleSingle) else tuple(schedule._stages)


def translate(schedule: Any) -> PipelineSchedule:
    """Return the actions of every rank in one ``schedule.step()``, from a schedule object.

    Raises UnsupportedError if the object has no such lists, ScheduleError if the lists cannot run.
    """
    if isinstance(schedule, host.Schedule1F1B):  # pipeline_order is one microbatch late on the last rank (2.13-2.15)
        return one_forward_one_backward(schedule._num_stages, schedule._n_microbatches)
    return from_action_lists(_action_lists(schedule))


def from_action_lists(lists: Mapping[int, Iterable[Any]]) -> PipelineSchedule:
    """Return the schedule of the host's action lists by rank. None in a list is an idle slot.

    Raises ScheduleError if it cannot run.
    """
    return PipelineSchedule(tuple(tuple(_computations(lists[rank])) for rank in sorted(lists))).validate()


def _action_lists(schedule: Any) -> Mapping[int, Iterable[Any]]:
    """Return the lists by rank that the schedule's loop runs."""
    # The runtime runs the lowered lists; a schedule that was loaded from a lowered CSV file has no others.
    name = "pipeline_order_with_comms" if isinstance(schedule, host._PipelineScheduleRuntime) else "pipeline_order"
    lists: Mapping[int, Iterable[Any]] | None = getattr(schedule, name, None)
    if not lists:
        raise UnsupportedError(
            f"timely_freeze cannot run here: this {type(schedule).__name__} does not say what its ranks run "
            f"(it has no {name}); load its actions before attaching, or use one of torch's own schedules"
        )
    return lists


def _computations(actions: Iterable[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:  # a forward and a backward, which the host runs one after the other
            yield from _computations(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield Action(action.stage_index, _KINDS[action.computation_type.value], action.microbatch_index)
