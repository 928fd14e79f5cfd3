"""Schedules by name, without processes: the orders that torch.distributed.pipelining's own classes make.

>>> named_schedule("one_f_one_b", ranks=2, microbatches=2).to_text()
[['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import PipelineSchedule

__all__ = ["NAMES", "named_schedule"]

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "one_f_one_b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "looped_bfs": "ScheduleLoopedBFS",
    "dualpipev": "ScheduleDualPipeV",
}
NAMES = tuple(_CLASSES)


def named_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> PipelineSchedule:
    """The schedule that torch runs under ``name`` (one of ``NAMES``).

    ``stages_per_rank`` is 1 for gpipe and one_f_one_b and 2 for the others, unless given (interleaved kinds
    only). Raises ScheduleError for a name, a size or a number of stages that torch does not take.
    """
    from torch.distributed.pipelining import schedules as host  # a second that importing the core should not take

    from tf_adapters.torch_pipelining.schedules import translate

    if name not in _CLASSES:
        raise ScheduleError(f"schedule {name!r} is not one of {', '.join(NAMES)}")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"{name}: {ranks} ranks and {microbatches} microbatches: at least 1 of each is needed")
    kind = getattr(host, _CLASSES[name])
    single = issubclass(kind, host.PipelineScheduleSingle)
    local = stages_per_rank or (1 if single else 2)
    if single and local != 1:
        raise ScheduleError(f"{name}: {local} stages per rank: it has one")
    try:
        return translate(kind(_stages(single, ranks, local), microbatches))
    except ValueError as error:
        raise ScheduleError(
            f"{name} on {ranks} ranks of {local} stages with {microbatches} microbatches: {error}"
        ) from error


def _stages(single: bool, ranks: int, local: int) -> Any:
    """What torch's schedules ask of their stages while they lay out an order: how many there are, and nothing else."""
    stage = SimpleNamespace(group_rank=0, group_size=ranks, submod=None, num_stages=ranks * local)
    return stage if single else [stage] * local
