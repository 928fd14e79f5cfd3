from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
from schedules import gpipe, one_f_one_b, split_one_f_one_b, v_shape

from tf_adapters.errors import ScheduleError
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule


def act(text: str) -> Action:
    return Action.parse(text)


def edge_texts(dag: PipelineDag) -> set[str]:
    return {
        f"{dag.actions[source]}->{dag.actions[target]}"
        for source, target in zip(dag.edges.sources, dag.edges.targets, strict=True)
    }


def simple_times(schedule: PipelineSchedule) -> dict[Action, float]:
    return {action: 2.0 if action.kind is Kind.BACKWARD else 1.0 for action in schedule.actions}


def test_edges_are_the_order_chain_and_the_transfers():
    dag = PipelineDag.from_schedule(gpipe(2, 2))
    assert edge_texts(dag) == {
        *("0F0->0F1", "0F1->0B0", "0B0->0B1", "1F0->1F1", "1F1->1B0", "1B0->1B1"),
        *("0F0->1F0", "0F1->1F1", "1B0->0B0", "1B1->0B1"),
    }


def test_split_backwards_pass_input_gradients_only():
    dag = PipelineDag.from_schedule(split_one_f_one_b(2, 1))
    assert edge_texts(dag) == {"0F0->0I0", "0I0->0W0", "1F0->1I0", "1I0->1W0", "0F0->1F0", "1I0->0I0"}


def test_a_transfer_within_a_rank_keeps_its_communication_time():
    schedule = v_shape(1, 1)
    dag = PipelineDag.from_schedule(schedule, {(act("0F0"), act("1F0")): 0.5})
    assert edge_texts(dag) == {"0F0->1F0", "1F0->1B0", "1B0->0B0"}
    assert dag.makespan(simple_times(schedule)) == 6.5


def test_actions_are_in_topological_order():
    dag = PipelineDag.from_schedule(split_one_f_one_b(4, 7))
    assert (dag.edges.sources < dag.edges.targets).all()
    assert all(dag.actions[position] == action for action, position in dag.index.items())
    assert (dag.edges.targets[:-1] <= dag.edges.targets[1:]).all()


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 2), (4, 8), (5, 3)])
def test_balanced_stages_take_microbatches_plus_stages_less_one_slots(make, stages, microbatches):
    schedule = make(stages, microbatches)
    makespan = PipelineDag.from_schedule(schedule).makespan(simple_times(schedule))
    assert makespan == 3.0 * (microbatches + stages - 1)


def test_start_times_by_hand():
    """F takes 1, B takes 2, a transfer forward takes 0.25::

    rank 0 | F0 [0,1] F1 [1,2]             B0 [4.25,6.25] B1 [7.25,9.25]
    rank 1 |          F0 [1.25,2.25] B0 [2.25,4.25] F1 [4.25,5.25] B1 [5.25,7.25]
    """
    schedule = one_f_one_b(2, 2)
    forward = {(act(f"0F{m}"), act(f"1F{m}")): 0.25 for m in range(2)}
    dag = PipelineDag.from_schedule(schedule, forward)
    times = simple_times(schedule)
    assert {str(action): start for action, start in dag.start_times(times).items()} == {
        **{"0F0": 0.0, "0F1": 1.0, "0B0": 4.25, "0B1": 7.25},
        **{"1F0": 1.25, "1B0": 2.25, "1F1": 4.25, "1B1": 5.25},
    }
    assert dag.makespan(times) == 9.25
    assert " ".join(map(str, dag.critical_path(times))) == "0F0 1F0 1B0 1F1 1B1 0B1"


def test_the_batch_ends_with_its_last_action_whatever_it_is():
    schedule = split_one_f_one_b(2, 1)
    dag = PipelineDag.from_schedule(schedule)
    times = dict.fromkeys(schedule.actions, 1.0) | {act("1W0"): 9.0}
    assert dag.makespan(times) == 12.0
    assert dag.critical_path(times)[-1] == act("1W0")


def test_times_of_zero():
    schedule = gpipe(2, 2)
    dag = PipelineDag.from_schedule(schedule)
    zero = dict.fromkeys(schedule.actions, 0.0)
    assert dag.makespan(zero) == 0.0
    assert set(dag.start_times(zero).values()) == {0.0}
    assert dag.critical_path(zero)


def test_the_critical_path_adds_up_to_the_makespan():
    schedule = split_one_f_one_b(4, 6)
    dag = PipelineDag.from_schedule(schedule, dict.fromkeys(schedule.transfers(), 0.125))
    times = {action: 1.0 + 0.01 * k for k, action in enumerate(schedule.actions)}
    path = dag.critical_path(times)
    delays = {
        (dag.actions[s], dag.actions[t]): d for s, t, d in zip(*(column.tolist() for column in dag.edges), strict=True)
    }
    length = sum(times[a] for a in path) + sum(delays[pair] for pair in pairwise(path))
    assert math.isclose(length, dag.makespan(times), rel_tol=1e-12)


def test_communication_must_join_stages():
    with pytest.raises(ScheduleError, match="0F0->0F1 is not an edge between stages"):
        PipelineDag.from_schedule(gpipe(2, 2), {(act("0F0"), act("0F1")): 1.0})


def test_a_wait_is_one_more_edge_and_joins_known_actions():
    schedule = gpipe(2, 2)
    dag = PipelineDag.from_schedule(schedule, waits={(act("1F1"), act("0B0")): 3.0})
    durations = dict.fromkeys(schedule.actions, 1.0)
    plain = PipelineDag.from_schedule(schedule).start_times(durations)
    assert dag.start_times(durations)[act("0B0")] == max(plain[act("0B0")], plain[act("1F1")] + 4.0)
    with pytest.raises(ScheduleError, match="1F1->0B7 is a wait between actions that this schedule does not have"):
        PipelineDag.from_schedule(schedule, waits={(act("1F1"), act("0B7")): 3.0})
    with pytest.raises(ScheduleError, match="the schedule deadlocks: 0F0 waits for 0B1, 1F0 waits for 0F0"):
        PipelineDag.from_schedule(schedule, waits={(act("0B1"), act("0F0")): 0.0})


def test_a_deadlock_is_refused():
    with pytest.raises(ScheduleError, match="deadlock"):
        PipelineDag.from_schedule(
            PipelineSchedule.from_text([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
        )


@pytest.mark.parametrize("module", ["schedule.ir", "schedule.dag", "planner", "planner.forecast", "cli.plan"])
def test_the_core_imports_neither_torch_nor_a_host_nor_the_solver(module):
    code = f"import sys, tf_adapters.{module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "deepspeed", "megatron", "ortools", "pandas"} & set(loaded)
