"""Schedules by name: exact small lists, every size complete and runnable, the same orders as torch's own tool says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from schedules import gpipe, one_f_one_b
from torch.distributed.pipelining import _schedule_visualizer as visualizer

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.schedule.orders import NAMES, named_schedule
from tf_adapters.testing.ranks import HANG_S

LISTS = {
    "gpipe": ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
    "one_f_one_b": ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
    "interleaved": ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    "zbv": [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
    ],
    "interleaved_zero_bubble": [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ],
    "looped_bfs": ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"],
}
TORCH_NAMES = {
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "looped_bfs": "LoopedBFS",
}
SIZES = [(1, 4), (2, 4), (2, 6), (3, 6), (4, 8), (6, 12), (6, 6), (8, 8)]
SPLIT = ("zbv", "interleaved_zero_bubble")


@pytest.mark.parametrize("name", sorted(LISTS))
def test_two_ranks_and_two_microbatches(name: str) -> None:
    assert [" ".join(rank) for rank in named_schedule(name, 2, 2).to_text()] == LISTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_runs_every_microbatch(name: str) -> None:
    for ranks, microbatches in SIZES:
        local = 1 if name in ("gpipe", "one_f_one_b") else 2
        if name == "dualpipev" and microbatches < 2 * ranks:
            continue
        schedule = named_schedule(name, ranks, microbatches).validate()
        present = set(schedule.actions)
        assert (len(schedule.ranks), schedule.num_stages) == (ranks, local * ranks)
        for stage in range(schedule.num_stages):
            for microbatch in range(microbatches):
                kinds = {kind for kind in Kind if Action(stage, kind, microbatch) in present}
                whole, split = {Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
                assert kinds == split if name in SPLIT else kinds in (whole, split)


@pytest.mark.parametrize("name", sorted(TORCH_NAMES))
def test_the_orders_are_those_of_torchs_own_visualizer(name: str) -> None:
    for ranks, microbatches in SIZES:
        listed = visualizer.get_schedule_ops(TORCH_NAMES[name], ranks, microbatches)
        texts = [
            [str(action) for action in rank if action and action.computation_type.value in "FBIW"] for rank in listed
        ]
        assert named_schedule(name, ranks, microbatches).to_text() == texts


def test_gpipe_and_1f1b_are_the_textbooks() -> None:
    for ranks, microbatches in SIZES:
        assert named_schedule("gpipe", ranks, microbatches) == gpipe(ranks, microbatches)
        assert named_schedule("one_f_one_b", ranks, microbatches) == one_f_one_b(ranks, microbatches)


def test_v_shapes_fold_and_loops_wrap_around() -> None:
    assert named_schedule("zbv", 4, 8).stages_of(0) == (0, 7)
    assert named_schedule("dualpipev", 4, 8).stages_of(1) == (1, 6)
    assert named_schedule("interleaved", 4, 8).stages_of(1) == (1, 5)
    assert named_schedule("interleaved", 2, 4, stages_per_rank=3).stages_of(1) == (1, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1b", 2, 2), "'1f1b' is not one of gpipe, one_f_one_b"),
        (("gpipe", 0, 2), "at least 1"),
        (("gpipe", 2, 2, 2), "2 stages per rank: it has 1"),
        (("interleaved", 4, 9), "2 rounds of equal size"),
        (("dualpipev", 4, 4), "at least one for each of 8 stages"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        named_schedule(*arguments)


def test_importing_the_modules_imports_no_torch() -> None:
    modules = "tf_adapters.schedule.orders, tf_adapters.simulate.model_costs"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=HANG_S).returncode == 0
