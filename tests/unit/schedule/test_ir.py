from __future__ import annotations

import pickle
import re
from itertools import pairwise

import pytest
from schedules import gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def rows(schedule: PipelineSchedule) -> list[str]:
    return [" ".join(rank) for rank in schedule.to_text()]


def schedule(*ranks: str) -> PipelineSchedule:
    return PipelineSchedule.from_text([rank.split() for rank in ranks])


def test_parse_and_print_are_inverses():
    for kind in Kind:
        action = Action(12, kind, 30)
        assert str(action) == f"12{kind.value}30"
        assert Action.parse(str(action)) == action
    assert Action.parse("2F0") == Action(stage=2, kind=Kind.FORWARD, microbatch=0)


def test_only_weight_gradients_can_be_frozen():
    assert [kind.value for kind in Kind if Action(0, kind, 0).freezable] == ["B", "W"]


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "0f0", "-1F0", "00F1", "0F01", " 0F0", "0F0\n", "0F0B1", 3])
def test_other_texts_are_no_actions(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_actions_and_schedules_are_values():
    made = one_f_one_b(2, 3)
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(one_f_one_b(2, 3))
    assert sorted([Action.parse("1F0"), Action.parse("0F1"), Action.parse("0B1")])[0] == Action.parse("0B1")


def test_generators_give_the_schedules_of_their_diagrams():
    assert rows(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert rows(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert rows(split_one_f_one_b(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert rows(split_gpipe(1, 2)) == ["0F0 0F1 0I0 0I1 0W0 0W1"]
    assert rows(v_shape(2, 1)) == ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, split_gpipe, split_one_f_one_b, v_shape])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 1), (3, 5), (4, 2)])
def test_schedules_that_run_are_valid_and_round_trip(make, stages, microbatches):
    made = make(stages, microbatches)
    assert made.validate() is made
    assert PipelineSchedule.from_text(made.to_text()) == made


def test_a_schedule_tells_its_shape():
    made = v_shape(2, 3)
    assert (made.num_stages, made.num_microbatches, len(made.actions)) == (4, 3, 24)
    assert [made.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [made.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    with pytest.raises(ScheduleError, match="stage 4 is on no rank"):
        made.rank_of(4)


def test_a_rank_may_be_idle():
    assert schedule("0F0 0B0", "").validate().stages_of(1) == ()


def test_transfers_join_neighbouring_stages():
    made = schedule("0F0 0I0 0W0", "1F0 1B0")
    assert {f"{source}->{target}" for source, target in made.transfers()} == {"0F0->1F0", "1B0->0I0"}


def test_execution_order_comes_after_what_it_waits_for():
    made = split_one_f_one_b(4, 6)
    place = {action: k for k, action in enumerate(made.execution_order())}
    assert len(place) == len(made.actions)
    assert all(place[source] < place[target] for source, target in made.transfers())
    assert all(place[a] < place[b] for rank in made.ranks for a, b in pairwise(rank))


WRONG = {
    "no actions": (("", ""), "the schedule has no actions", ()),
    "twice": (("0F0 0B0 0B0",), "0B0 is listed twice", ("0B0",)),
    "twice on two ranks": (("0F0 0B0", "0B0"), "0B0 is listed twice", ("0B0",)),
    "two ranks": (("0F0 0B0 0F1", "0B1"), "0B1 is on rank 1 but stage 0 is on rank 0", ("0B1",)),
    "no forward": (("0F0 0B0 0B1",), "0B1 has no forward: 0F1 is missing", ("0B1",)),
    "no backward": (("0F0 0B0 0F1",), "0F1 has no backward: 0B1, or 0I1 and 0W1, is missing", ("0F1",)),
    "no weight half": (("0F0 0I0",), "0I0 has no other half: 0W0 is missing", ("0I0",)),
    "no input half": (("0F0 0W0",), "0W0 has no other half: 0I0 is missing", ("0W0",)),
    "whole and split": (("0F0 0B0 0I0 0W0",), "0B0 and 0I0 are both there", ("0B0", "0I0")),
    "whole and half": (("0F0 0B0 0W0",), "0B0 and 0W0 are both there", ("0B0", "0W0")),
    "microbatch of one stage": (
        ("0F0 0F1 0B0 0B1", "1F0 1B0"),
        "1F1 is missing: stage 1 never runs microbatch 1",
        (),
    ),
    "gap in stages": (("0F0 0B0", "2F0 2B0"), "stage 1 is missing although 2F0 is there", ("2F0",)),
    "gap in microbatches": (("0F0 0B0 0F9 0B9",), "microbatch 1 is missing although 0F9 is there", ("0F9",)),
    "huge index": (
        ("0F0 0B0 0F999999999999 0B999999999999",),
        "microbatch 1 is missing",
        ("0F999999999999",),
    ),
    "backward first": (("0B0 0F0",), "0B0 comes before 0F0 on rank 0", ("0B0", "0F0")),
    "weight half first": (("0F0 0W0 0I0",), "0W0 comes before 0I0 on rank 0", ("0W0", "0I0")),
    "deadlock": (
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "the schedule deadlocks: 0B0 waits for 1B0, 1F1 waits for 0F1",
        ("0B0", "1F1"),
    ),
}


@pytest.mark.parametrize(("ranks", "message", "marked"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_schedule_is_refused_in_one_line_and_shown(ranks, message, marked):
    with pytest.raises(ScheduleError) as caught:
        schedule(*ranks).validate()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if marked:
        assert set(re.findall(r">(\w+)<", caught.value.grid)) == set(marked)


def test_the_grid_has_one_row_per_rank_and_marks_cells():
    made = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert made.grid([Action.parse("1B0")]).split("\n") == [
        "rank 0 | 0F0  0F1  0B0  0B1",
        "rank 1 | 1F0 >1B0< 1F1  1B1",
    ]
    assert ">" not in made.grid()
    assert schedule().grid() == ""
