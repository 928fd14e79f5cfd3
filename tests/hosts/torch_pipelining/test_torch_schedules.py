"""torch's action lists as our schedules: exact lists, every size, files, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from schedules import gpipe, one_f_one_b
from torch.distributed.pipelining import schedules as host
from torch_ranks import SCHEDULES, SINGLE, made, stages_of

from tf_adapters.errors import ScheduleError, UnsupportedError
from tf_adapters.schedule.orders import one_forward_one_backward
from tf_adapters.torch_pipelining.schedules import from_action_lists, translate

LISTS = {
    "ScheduleGPipe": ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"],
    "Schedule1F1B": ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    "ScheduleLoopedBFS": [
        "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0",
        "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0",
    ],
    "ScheduleInterleaved1F1B": [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    "ScheduleInterleavedZeroBubble": [
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3",
    ],
    "ScheduleZBVZeroBubble": [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ],
    "ScheduleDualPipeV": [  # "(0F3;3B1)OVERLAP_F_B" and two more on rank 0
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ],
}
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 6) for microbatches in range(1, 13)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_and_four_microbatches(name: str) -> None:
    assert [" ".join(rank) for rank in translate(made(name, 2, 4)).to_text()] == LISTS[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_that_torch_accepts_translates_to_a_schedule_that_can_run(name: str) -> None:
    accepted = 0
    for ranks, microbatches in SIZES:
        try:
            schedule = made(name, ranks, microbatches)
        except ValueError:
            continue
        translated = translate(schedule)
        assert translated.num_stages == ranks * (1 if name in SINGLE else 2), (ranks, microbatches)
        assert translated.num_microbatches == microbatches
        accepted += 1
    assert accepted >= 30


def test_1f1b_and_gpipe_are_the_ones_that_everybody_knows() -> None:
    for ranks, microbatches in SIZES:
        assert one_forward_one_backward(ranks, microbatches) == one_f_one_b(ranks, microbatches)
        assert translate(made("ScheduleGPipe", ranks, microbatches)) == gpipe(ranks, microbatches)


def test_what_schedule_1f1b_says_of_itself_cannot_run() -> None:
    """Its last rank begins with a microbatch too late. Once torch mends that, its list needs no rule of ours."""
    with pytest.raises(ScheduleError, match="0F8 is missing") as raised:
        from_action_lists(made("Schedule1F1B", 4, 8).pipeline_order)
    assert "3F1  3B0" in raised.value.grid


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in SINGLE])
def test_idle_slots_and_actions_that_compute_nothing_are_left_out(name: str) -> None:
    schedule = made(name, 2, 4)
    kinds = {action.computation_type for action in schedule.pipeline_order_with_comms[0]}
    assert {host.SEND_F, host.RECV_B, host.UNSHARD, host.RESHARD, host.REDUCE_GRAD} <= kinds
    for lists in (schedule.pipeline_order, schedule.pipeline_order_with_comms):
        assert [" ".join(rank) for rank in from_action_lists(lists).to_text()] == LISTS[name]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_schedules_from_a_file(name: str, form: Any, tmp_path: Any) -> None:
    made(name, 2, 4)._dump_csv(tmp_path / "schedule.csv", format=form)
    loaded = host._PipelineScheduleRuntime(stages_of(host._PipelineScheduleRuntime, 2), 4)
    loaded._load_csv(tmp_path / "schedule.csv", format=form)
    assert [" ".join(rank) for rank in translate(loaded).to_text()] == LISTS[name]


class OwnSchedule(host.PipelineScheduleSingle):
    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "name"),
    [(OwnSchedule, "pipeline_order"), (host._PipelineScheduleRuntime, "pipeline_order_with_comms")],
)
def test_a_schedule_that_does_not_say_what_it_runs_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        translate(kind(stages_of(kind, 2), 4))
    assert str(raised.value) == (
        f"timely_freeze cannot run here: this {kind.__name__} does not say what its ranks run (it has no {name}); "
        "load its actions before attaching, or use one of torch's own schedules"
    )
