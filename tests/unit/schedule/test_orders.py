"""Generated orders are those of torch.distributed.pipelining's own classes, action for action."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as host

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.deferral import most_in_flight
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.orders import named_schedule, one_forward_one_backward, v_with_whole_backwards
from tf_adapters.torch_pipelining.schedules import from_action_lists

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "looped_bfs": "ScheduleLoopedBFS",
    "dualpipev": "ScheduleDualPipeV",
}  # Schedule1F1B's own list is one microbatch late on the last rank
CASES = [
    (name, local)
    for name in CLASSES
    for local in ([1] if name == "gpipe" else [2] if name in ("zbv", "dualpipev") else [2, 3, 4])
]


def torchs(name: str, ranks: int, microbatches: int, local: int) -> PipelineSchedule | None:
    """What torch lays out; None for sizes that it does not take."""
    stage: Any = SimpleNamespace(group_rank=0, group_size=ranks, submod=None, num_stages=ranks * local)
    try:
        made = getattr(host, CLASSES[name])(stage if local == 1 else [stage] * local, microbatches)
    except (ValueError, AssertionError):
        return None
    lowered = isinstance(made, host._PipelineScheduleRuntime)
    return from_action_lists(made.pipeline_order_with_comms if lowered else made.pipeline_order)


@pytest.mark.parametrize(("name", "local"), CASES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_an_order_is_torchs(name: str, local: int, ranks: int) -> None:
    for microbatches in range(1, 25, 1 if ranks < 6 else 3):
        expected = torchs(name, ranks, microbatches, local)
        try:
            ours = named_schedule(name, ranks, microbatches, local)
        except ScheduleError:
            ours = None
        assert ours == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 16)])
def test_in_a_v_no_rank_holds_more_than_the_fullest_of_1f1b(ranks: int, microbatches: int) -> None:
    order = v_with_whole_backwards(ranks, microbatches)
    assert most_in_flight(order) <= 2 * most_in_flight(one_forward_one_backward(ranks, microbatches))
