"""Translate Megatron-Core's pipeline schedules, using Megatron's own tables and warm-up counts.

Source: megatron/core/pipeline_parallel/schedules.py (``get_schedule_table``, ``get_pp_rank_microbatches``) and
megatron/core/transformer/cuda_graphs.py (``convert_schedule_table_to_order``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from tf_adapters.collectives import Collectives, on_all_ranks
from tf_adapters.errors import ScheduleError
from tf_adapters.megatron.placement import PipelinePosition, v_order
from tf_adapters.megatron.send_waits import Row, send_waits
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def translate(
    collectives: Collectives, position: PipelinePosition, config: Any, num_microbatches: int, pp_group: Any
) -> PipelineSchedule:
    """Return the schedule of all ranks. Megatron's functions make each rank's row on that rank.

    ``config`` is the model's TransformerConfig. Called on all ranks. Raises ScheduleError on all if replicas disagree.
    """

    def local() -> tuple[int, Row]:
        return position.rank, local_row(position, config, pp_group, num_microbatches)

    rows: dict[int, Row] = {}
    for rank, row in on_all_ranks(collectives, local):
        if rows.setdefault(rank, row).actions != row.actions:
            both = PipelineSchedule((rows[rank].actions, row.actions)).grid()
            raise ScheduleError(f"two replicas of pipeline rank {rank} run different schedules:\n{both}")
    in_order = [rows[rank] for rank in sorted(rows)]
    own_order = position.chunks > 1 and not position.in_v  # Megatron's, with its blocking sends
    waits = own_order and not getattr(config, "overlap_p2p_comm_warmup_flush", False)
    schedule = PipelineSchedule(tuple(row.actions for row in in_order), send_waits(in_order) if waits else ())
    return schedule.validate()


def local_row(position: PipelinePosition, config: Any, pp_group: Any, num_microbatches: int) -> Row:
    """Return this rank's actions in one batch, in order."""
    if position.in_v:
        return Row(v_order(position.size, num_microbatches).ranks[position.rank], warmup=0, overlaps=False)
    interleaved = position.chunks > 1
    group_size = config.microbatch_group_size_per_vp_stage if interleaved else num_microbatches
    warmup = get_pp_rank_microbatches(
        num_microbatches, position.chunks, group_size, p2p_communicator=P2PCommunicator(pp_group, config)
    )[2]
    table = get_schedule_table(num_microbatches, position.chunks, group_size)
    actions = actions_of_order(convert_schedule_table_to_order(warmup, position.chunks, table), position)
    return Row(actions, warmup, bool(config.overlap_p2p_comm))


def actions_of_order(order: Sequence[int], position: PipelinePosition) -> tuple[Action, ...]:
    """Translate Megatron's order: c is a forward of chunk c - 1, -c a backward; microbatches ascend for each."""
    done: Counter[int] = Counter()
    actions = []
    for entry in order:
        kind = Kind.FORWARD if entry > 0 else Kind.BACKWARD
        actions.append(Action(position.stage(abs(entry) - 1), kind, done[entry]))
        done[entry] += 1
    return tuple(actions)
