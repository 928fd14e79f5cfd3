"""Updates before the norm is known: the trained weights are those of updates after it, whatever is clipped."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logged import Lines
from overlapping_steps import POST_VALIDATED
from post_validated_runs import ALWAYS, assert_nobody_waits, pausing, train_until_killed
from rank_pools import fork_ranks
from torch.distributed.pipelining.schedules import _Action
from torch.distributed.tensor import DTensor
from torch_ranks import Case, Run, attached, batch, pool

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.hosts import post_validation
from tf_adapters.report import Report
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.torch_pipelining.post_validation import before_backwards

pytestmark = pytest.mark.distributed

CASE = Case(ranks=4, microbatches=8, section=POST_VALIDATED, steps=20)
LIMITS = {
    "never": [1e6],
    "every second step": [1e6, ALWAYS],
    "always": [ALWAYS],
    "at the limit": [0.5, 0.6, 0.7, 0.8],
}


def disturb(run: Run) -> None:
    """Give each block dropout and a count of its forwards, which a repeated forward must not count twice."""
    for stage in run.stages:
        for layer in stage.submod.layers.values():
            layer.register_buffer("forwards", torch.zeros(()))

            def drop(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                module.forwards += 1
                return torch.nn.functional.dropout(output, 0.1)

            layer.register_forward_hook(drop)


def clip(run: Run, max_norm: float) -> torch.Tensor:
    """As a loop does: with us through the adapter, alone with a norm over all stages."""
    parameters = list(run.stages[0].submod.parameters())
    if run.adapter is not None:
        return run.adapter.clip_grad_norm_(parameters, max_norm)  # type: ignore[no-any-return]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total **= 2.0
    dist.all_reduce(total, group=run.stages[0].group)
    total **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def step_of(run: Run, step: int, limits: list[float]) -> tuple[list[torch.Tensor], torch.Tensor]:
    losses: list[torch.Tensor] = []
    (optimizer,) = run.optimizers
    optimizer.zero_grad(set_to_none=run.case.set_to_none)
    run._run(run.schedule.step, batch(run.case, step, run.replica), losses)
    norm = clip(run, limits[step % len(limits)])
    optimizer.step()
    return [loss.detach() for loss in losses], norm


def own_part(value: torch.Tensor) -> torch.Tensor:
    """What this rank has of a sharded tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def values(run: Run) -> dict[str, Any]:
    """Copies through ``state_dict``, as a checkpoint has them."""
    model = {name: own_part(value).clone() for name, value in run.stages[0].submod.state_dict().items()}
    state = run.optimizers[0].state_dict()["state"]
    moments = {f"{n}.{k}": own_part(v).clone() for n, of in state.items() for k, v in of.items() if torch.is_tensor(v)}
    return {**model, **moments}


def trained(case: Case, limits: list[float], pauses: bool = False, saved: tuple[int, ...] = ()) -> dict[str, Any]:
    """Train; ``saved`` are steps after which the state is read before the next one validates the update."""
    with Lines() as log, pausing(pauses):
        run = attached(case)
        disturb(run)
        torch.manual_seed(5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.9)
        losses, norms, between = [], [], []
        for step in range(case.steps):
            of_step, norm = step_of(run, step, limits)
            scheduler.step()
            losses += of_step
            norms.append(norm)
            if step in saved:
                between.append(values(run))
                between.append({"loss": torch.tensor(run.evaluate(step))})
        result: dict[str, Any] = {"norms": [float(norm) for norm in norms], "losses": list(map(float, losses))}
        if run.adapter is not None:
            validation, state = run.adapter.validation, run.adapter.controller.state
            run.adapter.detach()
            counts = validation and (validation.updates, validation.made_again)
            result |= {"failure": state.failure, "counts": counts}
        return {**result, "final": values(run), "between": between, "log": log.seen}


def assert_same_bits(ours: list[dict[str, Any]], case: Case, limits: list[float], world: int = 0, **how: Any) -> None:
    alone = pool(world or case.ranks).run(trained, replace(case, section=None), limits, *how.values())
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        for a, b in zip([mine["final"], *mine["between"]], [theirs["final"], *theirs["between"]], strict=True):
            assert a.keys() == b.keys()
            for name, value in b.items():
                assert torch.equal(a[name], value), name


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
@pytest.mark.parametrize("name", LIMITS)
def test_the_weights_are_those_of_updates_after_the_norm(tmp_path, name, schedule):
    steps = 40 if name == "every second step" else CASE.steps
    case = replace(CASE, schedule=schedule, steps=steps, output_dir=str(tmp_path))
    ours = pool(4).run(trained, case, LIMITS[name])
    assert_same_bits(ours, case, LIMITS[name])
    updates, made_again = ours[0]["counts"]
    assert [rank["counts"] for rank in ours] == [(updates, made_again)] * 4
    assert updates == case.steps - 1  # the warm-up's waits for the norm
    if name != "at the limit":
        share = {"never": 0.0, "every second step": 0.5, "always": 1.0}[name]
        assert made_again == pytest.approx(share * updates, abs=1)
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert f"{made_again} of them were made again, since clipping was due" in report.note[-1]


@pytest.mark.parametrize("how", [{"set_to_none": False}, {"optimizer": "SGD"}, {"checkpoint": True}, {"ranks": 2}])
def test_other_loops(tmp_path, how):
    case = replace(CASE, steps=12, output_dir=str(tmp_path), **how)
    limits = LIMITS["every second step"]
    assert_same_bits(pool(case.ranks).run(trained, case, limits), case, limits)


@pytest.mark.parametrize("replicas", ["fsdp", "fsdp nested", "fsdp kept", "fsdp whole", "fsdp mixed", "replicate"])
def test_fully_shard(tmp_path, replicas):
    """Two replicas of two stages. A state is read and a batch is evaluated between update and validation."""
    case = replace(CASE, ranks=2, replicas=replicas, steps=8, output_dir=str(tmp_path))
    how = {"pauses": False, "saved": (4, 5)}
    ours = pool(4).run(trained, case, LIMITS["every second step"], *how.values())
    assert_same_bits(ours, case, LIMITS["every second step"], world=4, **how)
    assert ours[0]["counts"] == (7, 4)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_frozen_weights_and_sampled_tokens(tmp_path, granularity):
    """The same plan with updates after the norm: masks, draws and what the optimizer leaves alone are the same."""
    section = {**POST_VALIDATED, "max_freeze_ratio": 0.8, "granularity": granularity}
    case = replace(CASE, section=section, ratios={f"0B{m}": 1.0 for m in range(8)}, steps=10, output_dir=str(tmp_path))
    ours = pool(4).run(trained, case, LIMITS["always"])
    waits = replace(case, section={**section, "optimizer_step": "synchronous"})
    for mine, theirs in zip(ours, pool(4).run(trained, waits, LIMITS["always"]), strict=True):
        assert mine["counts"] == (10, 10)
        assert mine["norms"] == theirs["norms"]
        assert mine["losses"] == theirs["losses"]
        for name, value in theirs["final"].items():
            assert torch.equal(mine["final"][name], value), name


def test_what_is_read_between_update_and_validation_is_final(tmp_path):
    """A checkpoint and an evaluation after a step whose update has to be made again."""
    case, limits = replace(CASE, steps=14, output_dir=str(tmp_path)), LIMITS["always"]
    saved = (6, 9, 13)
    ours = pool(4).run(trained, case, limits, False, saved)
    assert_same_bits(ours, case, limits, pauses=False, saved=saved)


def resumed(case: Case) -> dict[str, Any]:
    """Go back to an earlier state when the last update has to be made again."""
    run = attached(case)
    (optimizer,) = run.optimizers
    early: list[Any] = []
    for step in range(10):
        step_of(run, step, LIMITS["always"])
        if step == 4:
            early = copy.deepcopy([run.stages[0].submod.state_dict(), optimizer.state_dict()])
        if step == 7:
            run.stages[0].submod.load_state_dict(early[0])
            optimizer.load_state_dict(early[1])
    if run.adapter is not None:
        run.adapter.detach()
    return values(run)


def test_a_state_that_is_loaded_before_validation_stays(tmp_path):
    case = replace(CASE, output_dir=str(tmp_path))
    ours = pool(4).run(resumed, case)
    for mine, theirs in zip(ours, pool(4).run(resumed, replace(case, section=None)), strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_it_pauses_while_many_updates_are_made_again(tmp_path):
    case, limits = replace(CASE, steps=40, output_dir=str(tmp_path)), LIMITS["every second step"]
    ours = pool(4).run(trained, case, limits, True)
    assert_same_bits(ours, case, limits, pauses=True)
    updates, made_again = ours[0]["counts"]
    assert updates == post_validation._LOOKED_AT
    assert made_again == updates // 2
    [line] = [line for line in ours[0]["log"] if "wait for the norm" in line]
    assert "more than 20% of the last 20 updates were made again" in line


def saved_whole(case: Case) -> bool:
    """Save the stage itself, not its state."""
    run = attached(case)
    for step in range(8):
        step_of(run, step, LIMITS["always"])
    run.adapter.settle()
    saved = io.BytesIO()
    torch.save(run.stages[0].submod, saved)
    saved.seek(0)
    copy = torch.load(saved, weights_only=False)
    final = values(run)
    same = all(torch.equal(final[name], value) for name, value in copy.state_dict().items())
    run.adapter.detach()
    return same


def test_a_stage_can_be_saved_whole(tmp_path):
    assert all(pool(2).run(saved_whole, replace(CASE, ranks=2, output_dir=str(tmp_path))))


def killed(case: Case, killed_rank: int) -> None:
    run = attached(case)
    train_until_killed(lambda step: step_of(run, step, LIMITS["always"]), case.steps, killed_rank)


@pytest.mark.parametrize("killed_rank", [0, 2])
def test_a_rank_that_is_killed_before_validation_leaves_nobody_waiting(tmp_path, killed_rank):
    with fork_ranks(4) as ranks:
        assert_nobody_waits(ranks, killed, replace(CASE, output_dir=str(tmp_path)), killed_rank)


def overlap(case: Case, limit: float) -> Any:
    with EmulatedDevice(1.5e6):
        run = attached(case)
        for step in range(12):
            step_of(run, step, [limit])
        known = run.adapter.controller.state.measurement
        run.adapter.detach()
    return known.steps


@pytest.mark.parametrize(("step", "found"), [("post_validated", "overlap"), ("synchronous", "meet")])
def test_ranks_do_not_meet_for_the_norm(tmp_path, step, found):
    section = {**POST_VALIDATED, "optimizer_step": step, "monitoring_steps": 8}
    case = replace(CASE, section=section, output_dir=str(tmp_path))
    assert pool(4).run(overlap, case, 1e6) == [found] * 4


def refused(case: Case) -> str:
    try:
        attached(case)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


REFUSED = {
    "several stages": ({"schedule": "ScheduleInterleaved1F1B"}, "needs one stage on each rank"),
    "no optimizer": ({"give_optimizer": False}, "needs the optimizers of this rank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused_in_one_line(name):
    how, words = REFUSED[name]
    for line in pool(2).run(refused, Case(section=POST_VALIDATED, **how)):
        assert words in line
        assert line.endswith('use optimizer_step "synchronous"')
        assert "\n" not in line


def test_nothing_of_a_backward_begins_before_the_update_is_final():
    """A receive of a gradient that began earlier would hold up the activations that are sent again, on NCCL."""
    actions = [_Action.from_str(text) for text in ("1RECV_F0", "1F0", "1SEND_F0", "1RECV_B0", "1RECV_F1", "1F1", "1I0")]
    assert [str(action) for action in before_backwards(actions)] == ["1RECV_F0", "1F0", "1SEND_F0"]
    assert before_backwards(actions[4:]) == actions[4:6]
    assert before_backwards(actions[:3]) == actions[:3]
