"""Orders of actions for named pipeline schedules, generated without a host.

F is a forward, B a full backward; the number behind it is the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

__all__ = ["gpipe", "looped_bfs", "one_forward_one_backward"]


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards. Source: Huang et al., GPipe, 2019. Two stages, three microbatches::

    rank 0 | F0 F1 F2 .  .  B0 B1 B2
    rank 1 | .  F0 F1 F2 B0 B1 B2
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return PipelineSchedule(
        tuple(tuple(Action(rank, kind, m) for kind in kinds for m in range(microbatches)) for rank in range(ranks))
    ).validate()


def one_forward_one_backward(ranks: int, microbatches: int) -> PipelineSchedule:
    """Rank r of R runs R - r forwards, then a backward and a forward in turn. Source: Narayanan et al., 2019.

    Three stages, four microbatches::

        rank 0 | F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    return PipelineSchedule(
        tuple(tuple(_one_rank(rank, min(microbatches, ranks - rank), microbatches)) for rank in range(ranks))
    ).validate()


def _one_rank(stage: int, warmup: int, microbatches: int) -> Iterator[Action]:
    for microbatch in range(warmup):
        yield Action(stage, Kind.FORWARD, microbatch)
    for microbatch in range(microbatches):
        yield Action(stage, Kind.BACKWARD, microbatch)
        if warmup + microbatch < microbatches:
            yield Action(stage, Kind.FORWARD, warmup + microbatch)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """All forwards of a rank's first stage, of its second, ...; then the backwards in the opposite order.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022. Stages 0 and 2 on rank 0, two microbatches
    (in each cell: stage, kind, microbatch)::

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
        rank 1 | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Action(stage, Kind.FORWARD, m) for stage in stages for m in range(microbatches)]
        orders.append((*forwards, *(Action(a.stage, Kind.BACKWARD, a.microbatch) for a in reversed(forwards))))
    return PipelineSchedule(tuple(orders)).validate()
