"""Ranks that skip updates, and several batches for each update: no rank waits, and the bits are the host's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logged import Lines
from torch_ranks import Case, Run, attached, batch, pool, values

from tf_adapters.hosts.boundaries import PATIENCE

pytestmark = pytest.mark.distributed

EXACT: dict[str, Any] = {
    "max_freeze_ratio": 0.0,
    "weight_gradients": "deferred",
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 1,
    "replan_interval": 3,
}
Skips = dict[int, tuple[int, ...]]
"""By rank, the updates that it skips, from 0."""

ONE, TWO = (1,) * 8, (2,) * 6
RUNS: dict[str, tuple[tuple[int, ...], Skips]] = {
    "the first update": (ONE, {0: (0,)}),
    "the first update, last rank": (ONE, {1: (0,)}),
    "in monitoring": (ONE, {1: (1,), 0: (2,)}),
    "under the plan": (ONE, {1: (4,), 0: (5,)}),
    "several in turn": (ONE, {0: (1, 2, 3, 5), 1: (2, 3, 4)}),
    "the last update": (ONE, {1: (7,)}),
    "all updates": (ONE, {1: tuple(range(8))}),
    "no rank updates first": (ONE, {0: (0, 1), 1: (0, 1)}),
    "accumulated, the first update": (TWO, {0: (0,)}),
    "accumulated, in monitoring": (TWO, {1: (1, 2)}),
    "accumulated, the last update": (TWO, {0: (5,), 1: (4,)}),
    "more batches for each update": ((1, 1, 1, 2, 2, 3, 3), {}),
    "fewer batches for each update": ((3, 3, 2, 2, 1, 1, 1), {}),
    "a short update, which a rank skips": ((3, 3, 3, 1, 3, 3), {1: (3,)}),
}


def test_training_is_the_hosts_to_the_bit_whoever_skips_an_update() -> None:
    case = Case(recorded=False, section=EXACT)
    alone = pool(2).run(train_all, replace(case, section=None))
    ours = pool(2).run(train_all, case)
    for name, (batches, _) in RUNS.items():
        assert ours[0][name]["steps"] == ours[1][name]["steps"] >= len(batches) // 2, name
        for mine, theirs in zip(ours, alone, strict=True):
            assert mine[name]["failure"] is None, name
            for key, value in theirs[name]["parameters"].items():
                assert torch.equal(mine[name]["parameters"][key], value), (name, key)


def train_all(case: Case) -> dict[str, Any]:
    rank = dist.get_rank()
    return {name: train_skipping(case, batches, skips.get(rank, ())) for name, (batches, skips) in RUNS.items()}


def train_skipping(case: Case, batches: tuple[int, ...], skipped: tuple[int, ...]) -> dict[str, Any]:
    run = attached(replace(case, batches=2))  # so that the host does not divide accumulated gradients again
    for update, number in enumerate(batches):
        accumulate(run, update, number)
        if update not in skipped:
            for optimizer in run.optimizers:
                optimizer.step()
        dist.all_reduce(torch.ones(1))  # such as the mean loss: the host's ranks meet between two batches
        if update == 3:
            run.evaluate(update)
    result: dict[str, Any] = {"parameters": values(run)}
    if run.adapter is not None:
        run.adapter.detach()
        controller = run.adapter.controller
        result |= {"steps": controller.state.completed_steps, "failure": controller.state.failure}
    return result


def accumulate(run: Run, update: int, batches: int) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    for number in range(batches):
        run._run(run.schedule.step, batch(run.case, update, run.replica, number), [])


# --- a checkpoint before the ranks have decided ---------------------------------------------------------------


def test_a_run_resumes_with_the_decisions_that_its_checkpoint_left_open() -> None:
    section = {"method": "apf", "stability_check_interval": 1, "apf_threshold": 0.4, "warmup_steps": 1}
    for undecided, through, resumed in pool(2).run(resumed_undecided, Case(section=section)):
        assert undecided
        assert resumed == through
        assert any(names for masks in through for names in masks.values())


def resumed_undecided(case: Case) -> tuple[bool, list[Any], list[Any]]:
    run = attached(case)
    for step in range(6):
        run.train_step(step)
    other = attached(case)
    for mine, theirs in zip(other.stages, run.stages, strict=True):
        mine.submod.load_state_dict(theirs.submod.state_dict())
    for fresh, trained in zip(other.optimizers, run.optimizers, strict=True):
        fresh.load_state_dict(copy.deepcopy(trained.state_dict()))
    undecided = run.adapter.controller.state.undecided
    other.adapter.load_state_dict(run.adapter.state_dict())
    return undecided, masks_that_follow(run), masks_that_follow(other)


def masks_that_follow(run: Run) -> list[Any]:
    """The masks of the next three steps, read after each."""
    masks = []
    for step in range(6, 9):
        run.train_step(step)
        controller = run.adapter.controller
        masks.append({(s, m): controller.mask(s, m).names for s in controller.parameter_masks for m in range(4)})
    return masks


# --- what all batches of an update froze ---------------------------------------------------------------------


def test_gradients_of_an_earlier_step_are_not_held() -> None:
    """An update of two batches that are two steps: only what both froze gets no gradient."""
    for dropped, of_both, of_last in pool(2).run(longer_update, Case(ratios=0.9, microbatches=2)):
        assert dropped == of_both
        assert dropped < of_last


def longer_update(case: Case) -> tuple[set[str], set[str], set[str]]:
    run = attached(case)
    controller, stage = run.adapter.controller, dist.get_rank()
    for step in range(2):  # one batch for each update
        run.train_step(step)
    first = controller.step
    accumulate(run, 2, 2)
    frozen = [
        set.intersection(*(set(controller.frozen_parameters(step, stage, m)) for m in range(case.microbatches)))
        for step in (first, first + 1)
    ]
    for optimizer in run.optimizers:
        optimizer.step()
    return {name for name, p in run.named.items() if p.grad is None}, frozen[0] & frozen[1], frozen[1]


# --- an optimizer whose step() never runs --------------------------------------------------------------------


class TwoSteps(torch.optim.SGD):
    """Updates as SAM's published code does: through methods other than ``step``."""

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


@pytest.mark.parametrize("batches", [3, PATIENCE + 6])
def test_an_optimizer_that_never_steps_is_said_once_and_trains_as_without_us(batches: int) -> None:
    case = Case(section=EXACT, microbatches=2)
    alone = pool(2).run(train_without_steps, replace(case, section=None), batches)
    ours = pool(2).run(train_without_steps, case, batches)
    for (mine, *_), (theirs, *_) in zip(ours, alone, strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    for _, _, notes, steps in ours:
        assert steps == 0
        assert sum("no update was seen in" in note for note in notes) == 1
    said = [line for line in ours[0][1] if "no update was seen in" in line]
    assert len(said) == 1
    assert f"in {min(batches, PATIENCE)} batches" in said[0]


def train_without_steps(case: Case, batches: int) -> tuple[dict[str, torch.Tensor], list[str], tuple[str, ...], int]:
    import tf_adapters.torch_pipelining

    run = attached(replace(case, section=None))
    optimizer = TwoSteps([p for stage in run.stages for p in stage.submod.parameters()], lr=0.1)
    run.optimizers = [optimizer]
    with Lines() as lines:
        if case.section is not None:
            run.adapter = tf_adapters.torch_pipelining.attach(run.schedule, case.settings(), optimizer=optimizer)
        for number in range(batches):
            accumulate(run, number, 1)
            optimizer.second_step()
        state = None
        if run.adapter is not None:
            run.adapter.detach()
            state = run.adapter.controller.state
    return values(run), lines.seen, state.notes if state else (), state.completed_steps if state else 0
