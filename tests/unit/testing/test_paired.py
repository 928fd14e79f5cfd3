"""Two trainings in turn: which step runs when, and what is made of the times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rank_pools import fork_ranks

from tf_adapters.testing.paired import Pairs, in_turn, on_and_off, time_masks, timed_step


class Diary:
    """Functions that write down that they ran."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def of(self, name: str) -> Callable[[], None]:
        return lambda: self.entries.append(name)


def test_the_ratio_is_the_median_of_the_pairs_and_not_of_the_times():
    pairs = Pairs()
    for alone, attached in ((100.0, 50.0), (200.0, 120.0), (400.0, 280.0)):
        pairs.add("stable", alone, attached)
    assert pairs.ratio("stable") == 0.6
    assert pairs.alone == {"stable": [100.0, 200.0, 400.0]}
    assert pairs.attached == {"stable": [50.0, 120.0, 280.0]}


def test_a_phase_without_pairs_has_no_ratio():
    with pytest.raises(KeyError, match="stable"):
        Pairs().ratio("stable")


def test_a_step_is_run_once_and_timed():
    diary = Diary()
    assert timed_step(diary.of("step")) > 0
    assert diary.entries == ["step"]


def test_two_trainings_take_turns_at_going_first():
    diary = Diary()
    phases = iter(["warmup", "warmup", "stable", "stable"])
    pairs = in_turn(diary.of("alone"), diary.of("attached"), lambda: next(phases), steps=4)
    assert diary.entries == ["attached", "alone", "alone", "attached"] * 2
    assert {phase: len(times) for phase, times in pairs.alone.items()} == {"warmup": 2, "stable": 2}
    assert {phase: len(times) for phase, times in pairs.attached.items()} == {"warmup": 2, "stable": 2}


def test_one_training_is_measured_on_and_off_in_turn():
    diary = Diary()
    pairs = on_and_off(diary.of("step"), diary.of("attach"), diary.of("detach"), "off", pairs=2)
    assert diary.entries == ["detach", "step", "attach", "step", "step", "detach", "step", "attach"]
    assert len(pairs.alone["off"]) == len(pairs.attached["off"]) == 2


def test_masks_are_timed_on_every_stage_of_the_rank_for_forward_and_backward():
    drawn: list[tuple[int, int, int]] = []
    applied: list[tuple[str, ...]] = []

    def frozen_parameters(step: int, stage: int, microbatch: int) -> tuple[str, ...]:
        drawn.append((step, stage, microbatch))
        return (f"{stage}.{microbatch}",)

    @contextmanager
    def frozen(names: tuple[str, ...]) -> Any:
        applied.append(names)
        yield

    masks = SimpleNamespace(frozen=frozen)
    controller: Any = SimpleNamespace(
        step=7,
        schedule=SimpleNamespace(num_microbatches=3),
        parameter_masks={0: masks, 2: masks},
        frozen_parameters=frozen_parameters,
    )
    assert time_masks(controller, steps=2) > 0
    assert drawn == [(step, stage, m) for step in (7, 8) for stage in (0, 2) for m in range(3)]
    assert applied == [(f"{stage}.{m}",) for _ in (7, 8) for stage in (0, 2) for m in range(3) for _ in range(2)]


@pytest.mark.distributed
def test_a_step_lasts_until_the_slowest_rank_is_done():
    with fork_ranks(2) as ranks:
        assert all(ranks.run(one_slow_rank))


def one_slow_rank() -> bool:
    """On a rank: whether rank 1's step, which ends long after rank 0's, had ended when the time was taken."""
    import time

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()

    def step() -> None:
        if dist.get_rank() == 0:
            store.set("the fast rank is done", "")
            return
        store.wait(["the fast rank is done"])
        time.sleep(0.2)
        store.set("the slow rank is done", "")

    timed_step(step)
    return store.check(["the slow rank is done"])
