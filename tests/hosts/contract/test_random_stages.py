"""A few of the random stages of `make faults`, and that what is wrong with one is found."""

from __future__ import annotations

import pytest
from random_stages import judge, some_modes
from rank_pools import rank_pool
from stage_cases import BEGINS_LATER, HOSTILE, KNOWN, LEAVES, PARTS, Case, Spec, case_of_one, draw_case, smaller
from stage_plants import FOUND

pytestmark = pytest.mark.distributed

PLANTED = [(plant, case) for plant, cases in FOUND.items() for case in cases]


@pytest.mark.parametrize("number", [1, 4, 5, 7, 10, 13, 14, 15])
def test_random_stages_train_as_the_host_and_the_oracle_say(number: int) -> None:
    case = draw_case(number)
    result = judge(rank_pool("torch", 2), case, some_modes(case))
    assert not result.wrong, str(result)
    assert not result.skipped


def test_a_backward_inside_a_forward_accumulates_there() -> None:
    """Later, its gradients would be added up in another order wherever the plan moves forwards."""
    case = Case(1, ((Spec("LocalLoss"), Spec("Perceptron")), (Spec("Perceptron"),)), extra_microbatches=1)
    result = judge(rank_pool("torch", 2), case, ("nothing, deferred",))
    assert not result.wrong, str(result)


def test_a_plan_that_moves_forwards_is_given_up_where_a_loss_accumulates() -> None:
    """Its gradients would be added up in another order. Here the plan is in force before the first check."""
    case = Case(1, ((Spec("Linear"),), (Spec("BackwardInLoss", way="checkpointed"),)), schedule="ScheduleGPipe")
    result = judge(rank_pool("torch", 2), case, ("nothing, deferred",))
    assert not result.wrong, str(result)
    assert result.said


def test_masks_of_another_microbatch_are_found() -> None:
    case = Case(1, ((Spec("Linear"), Spec("Norm")), (Spec("Perceptron"),)))
    result = judge(rank_pool("torch", 2), case, ("masks, in place", "masks, deferred"), plant="masks")
    assert set(result.wrong) == {"masks, in place", "masks, deferred"}


@pytest.mark.parametrize(("plant", "case"), PLANTED, ids=[f"{plant}, {case.stages[0][1]}" for plant, case in PLANTED])
def test_hostile_parts_are_right_only_because_of_a_defence(plant: str, case: Case) -> None:
    pool, modes = rank_pool("torch", 2), ("nothing, deferred",)
    result, without_defence = judge(pool, case, modes), judge(pool, case, modes, plant)
    assert not result.wrong, str(result)
    assert not result.skipped
    assert without_defence.wrong or without_defence.said
    assert (without_defence.wrong, without_defence.said) != (result.wrong, result.said)


def test_what_begins_in_the_middle_of_a_run_is_said() -> None:
    case = case_of_one("WeightElsewhere", "norm", BEGINS_LATER)
    result = judge(rank_pool("torch", 2), case, ("nothing, deferred",))
    assert not result.wrong
    assert "step 2: gradient stages.1.parts.1.layer.weight" in result.said["nothing, deferred"]


def test_what_begins_while_the_host_accumulates_other_microbatches_is_said() -> None:
    """With an extra microbatch, the host's own backwards come between a tapped forward and its backward."""
    case = Case(147, ((Spec("WeightElsewhere", 5, way="norm", begins=1),), ()), extra_microbatches=1)
    result = judge(rank_pool("torch", 2), case, ("nothing, deferred",))
    assert not result.wrong, str(result)
    assert result.said


def test_what_one_rank_raises_is_found_and_the_next_mode_goes_on() -> None:
    case = Case(1, ((Spec("Linear"),), (Spec("Linear"),)))
    modes = ("nothing, deferred", "masks, in place")
    result = judge(rank_pool("torch", 2), case, modes, plant="raise on rank 1")
    assert list(result.wrong) == ["nothing, deferred"]
    assert result.wrong["nothing, deferred"] == ["raised ZeroDivisionError: planted"]


def test_a_case_is_a_function_of_its_number_and_gets_smaller() -> None:
    assert draw_case(5) == draw_case(5) != draw_case(6)
    assert {kind for known in KNOWN for kind in known.rstrip(")").split("(")} <= {*PARTS, *LEAVES}
    assert {kind for of in FOUND.values() for case in of for kind in case.kinds} - {"Linear", "Norm"} <= {*HOSTILE}
    assert all(case.kinds <= draw_case(5).kinds for case in smaller(draw_case(5)))
