"""torch.distributed.pipelining's action lists as our schedule.

Source: torch/distributed/pipelining/schedules.py. Its actions print as ours do; those that move tensors, shard
parameters or reduce gradients are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.distributed.pipelining import schedules as host

from tf_adapters.errors import UnsupportedError
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

_KINDS = {kind.value: kind for kind in Kind}


def stages_of(schedule: Any) -> tuple[Any, ...]:
    """This rank's stage objects."""
    return (schedule._stage,) if isinstance(schedule, host.PipelineScheduleSingle) else tuple(schedule._stages)


def translate(schedule: Any) -> PipelineSchedule:
    """What every rank runs in one ``schedule.step()``, from a schedule object.

    Raises UnsupportedError if the object does not tell, ScheduleError if what it tells cannot run.
    """
    if isinstance(schedule, host.Schedule1F1B):
        return one_forward_one_backward(schedule._num_stages, schedule._n_microbatches)
    return from_action_lists(_action_lists(schedule))


def from_action_lists(lists: Mapping[int, Iterable[Any]]) -> PipelineSchedule:
    """The schedule that the host's action lists by rank stand for; None in a list is an idle slot.

    Raises ScheduleError if it cannot run.
    """
    return PipelineSchedule(tuple(tuple(_computations(lists[rank])) for rank in sorted(lists))).validate()


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """What Schedule1F1B runs; its own ``pipeline_order`` is one microbatch late on the last rank (torch 2.13 to 2.15).

    Stage s runs S - s forwards, then a backward and a forward in turn. Three stages, four microbatches::

        rank 0 | F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    return PipelineSchedule(
        tuple(tuple(_one_rank(stage, min(microbatches, stages - stage), microbatches)) for stage in range(stages))
    ).validate()


def _one_rank(stage: int, ahead: int, microbatches: int) -> Iterator[Action]:
    for microbatch in range(ahead):
        yield Action(stage, Kind.FORWARD, microbatch)
    for microbatch in range(microbatches):
        yield Action(stage, Kind.BACKWARD, microbatch)
        if ahead + microbatch < microbatches:
            yield Action(stage, Kind.FORWARD, ahead + microbatch)


def _action_lists(schedule: Any) -> Mapping[int, Iterable[Any]]:
    """The lists by rank that the schedule's own loop walks along."""
    # The runtime walks along the lowered lists; one loaded from a lowered CSV file has no others.
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
        if action.sub_actions is not None:  # an overlapped forward and backward: the host runs one after the other
            yield from _computations(action.sub_actions)
        elif action.computation_type.value in _KINDS:
            yield Action(action.stage_index, _KINDS[action.computation_type.value], action.microbatch_index)
