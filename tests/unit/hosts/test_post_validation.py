"""What is under way when forwards run again, in rewritten orders: it follows from the order on every rank."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, _Action, _ComputationType, _PipelineScheduleRuntime
from torch_ranks import stages_of

from tf_adapters.hosts.forwards_again import Rewindable, forwards_in_prefix
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.deferral import DeferralTimes, defer, first_half, joined, second_half, split
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.schedule.messages import receive_points
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.torch_pipelining.post_validation import before_backwards


def rewritten(stages: int, microbatches: int, extra: int, seed: int) -> tuple[PipelineSchedule, dict]:
    """A rewritten order, and the ends of its actions, for random times."""
    host, random = one_forward_one_backward(stages, microbatches), np.random.default_rng(seed)
    ms = {action: float(random.uniform(0.2, 3.0)) for action in split(host).actions}
    order = joined(defer(host, DeferralTimes(ms, {}, {}), extra_microbatches=extra), host.actions)
    ms |= {a: ms[first_half(a)] + ms[second_half(a)] for a in order.actions if a.kind is Kind.BACKWARD}
    starts = PipelineDag.from_schedule(order).start_times(ms)
    return order, {action: starts[action] + ms[action] for action in order.actions}


orders = given(
    stages=st.integers(2, 5), more=st.integers(0, 5), extra=st.integers(0, 5), seed=st.integers(0, 2**32 - 1)
)


@orders
@settings(max_examples=100)
def test_no_rank_waits_for_an_activation_that_was_not_sent(stages, more, extra, seed):
    order, ends = rewritten(stages, stages + more, extra, seed)
    before = receive_points(order, ends)
    for rank in range(stages):
        forwards, received = forwards_in_prefix(order, before, rank)
        assert forwards
        assert all(action.kind is Kind.FORWARD for action in forwards)
        if rank:
            sent = len(forwards_in_prefix(order, before, rank - 1)[0])
            assert len(forwards) <= received <= sent


@orders
@settings(max_examples=30)
def test_nor_in_the_actions_that_torch_adds_messages_to(stages, more, extra, seed):
    order, _ = rewritten(stages, stages + more, extra, seed)
    runtime = _PipelineScheduleRuntime([stages_of(Schedule1F1B, stages)], stages + more)
    lists = {rank: [_Action.from_str(text) for text in texts] for rank, texts in enumerate(order.to_text())}
    runtime._prepare_schedule_with_comms(lists)
    lowered = runtime.pipeline_order_with_comms
    for rank in range(1, stages):
        counts = []
        for of, kind in ((rank - 1, _ComputationType.SEND_F), (rank, _ComputationType.RECV_F)):
            counts.append(sum(action.computation_type is kind for action in before_backwards(lowered[of])))
        sent, received = counts
        assert 0 < received <= sent


def test_data_comes_again_and_then_goes_on():
    data = Rewindable(iter(range(6)), torch.device("cpu"))
    assert [next(data), next(data)] == [0, 1]
    data.rewind()
    assert next(data) == 0
    data.rewind()
    assert [next(data), next(data), next(data)] == [0, 1, 2]
    data.go_on()
    assert list(data) == [3, 4, 5]
