"""Schedules, transfers and loaders of other projects on DeepSpeed's engine: what we would replace is found at attach.

And batches that may not run in a plan's order since their shapes are made unknown each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as host
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed_ranks import Case, batch, build_engine, parameters_of
from logged import Lines

from tf_adapters.errors import UnsupportedError
from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed
DEFERRED = {"weight_gradients": "deferred"}
WRITTEN = host.TrainSchedule.steps


class Stretch(host.PipeInstruction):
    """An instruction that DeepSpeed does not have."""


def loads_first(schedule: Any) -> Iterator[list[Any]]:
    """DeepSpeed's order, but for loads: they come before the transfers of their step."""
    for given in WRITTEN(schedule):
        yield sorted(given, key=lambda instruction: not isinstance(instruction, host.LoadMicroBatch))


def with_another_instruction(schedule: Any) -> Iterator[list[Any]]:
    for given in WRITTEN(schedule):
        yield [Stretch(), *given]


def as_written(schedule: Any) -> Iterator[list[Any]]:
    """Code of another project that changes nothing."""
    yield from WRITTEN(schedule)


def exec_schedule(engine: Any, schedule: Any, run: Any = PipelineEngine._exec_schedule) -> None:
    run(engine, schedule)


def send_grads(engine: Any, buffer_id: int, run: Any = PipelineEngine._INSTRUCTION_MAP[host.SendGrad]) -> None:
    run(engine, buffer_id)


def send(tensor: Any, dest_stage: int, async_op: bool = False, run: Any = p2p.send) -> None:
    run(tensor, dest_stage, async_op)


class Own(host.PipeSchedule):
    """A schedule that DeepSpeed does not have. It runs as 1F1B."""

    def steps(self) -> Iterator[list[Any]]:
        return WRITTEN(host.TrainSchedule(self.micro_batches, self.stages, self.stage_id))

    def num_pipe_buffers(self) -> int:
        return host.TrainSchedule(self.micro_batches, self.stages, self.stage_id).num_pipe_buffers()


Replace = Callable[[pytest.MonkeyPatch], None]


def steps(function: Any) -> Replace:
    return lambda patch: patch.setattr(host.TrainSchedule, "steps", function)


REPLACED: dict[str, tuple[Replace, str]] = {
    "loads first": (steps(loads_first), "(TrainSchedule.steps of test_deepspeed_replaced)"),
    "another instruction": (steps(with_another_instruction), "(TrainSchedule.steps of test_deepspeed_replaced)"),
    "a schedule of its own": (
        lambda patch: patch.setattr(
            PipelineEngine,
            "_train_schedule",
            lambda engine: Own(engine.micro_batches, engine.num_stages, engine.stage_id),
        ),
        "(Own.steps of test_deepspeed_replaced)",
    ),
    "the engine's loop": (
        lambda patch: patch.setattr(PipelineEngine, "_exec_schedule", exec_schedule),
        "the engine's _exec_schedule (test_deepspeed_replaced)",
    ),
    "an instruction that sends": (
        lambda patch: patch.setitem(PipelineEngine._INSTRUCTION_MAP, host.SendGrad, send_grads),
        "the engine's SendGrad (test_deepspeed_replaced)",
    ),
    "what sends": (lambda patch: patch.setattr(p2p, "send", send), "the engine's p2p.send (test_deepspeed_replaced)"),
}


@pytest.mark.parametrize("section", [DEFERRED, {"schedule": "gpipe"}, {"schedule": "1f1b"}], ids=str)
@pytest.mark.parametrize("name", REPLACED)
def test_what_an_order_of_ours_would_replace_is_refused_on_all_ranks(pools: Any, name: str, section: Any) -> None:
    lines = pools(2).run(attach_with, name, section)
    assert lines[0] == lines[1]
    line, untouched = lines[0]
    asked = 'weight_gradients "deferred"' if section == DEFERRED else f'schedule "{section["schedule"]}"'
    assert line.startswith("timely_freeze cannot run here: ")
    assert REPLACED[name][1] in line
    assert f"is not DeepSpeed's own, and {asked} would run without what it does" in line
    assert untouched


def attach_with(name: str, section: dict[str, Any]) -> tuple[str, bool]:
    import tf_adapters.deepspeed

    with pytest.MonkeyPatch.context() as patch:
        REPLACED[name][0](patch)
        engine = build_engine(Case(section=section))
        before = dict(vars(engine))
        with pytest.raises(UnsupportedError) as caught:
            tf_adapters.deepspeed.attach(engine)
        return str(caught.value), vars(engine).keys() == before.keys()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_that_is_not_deepspeeds_keeps_its_weight_gradients(pools: Any, dynamic: bool) -> None:
    for line in pools(2).run(attach_with_own_backward, Case(section=DEFERRED, dynamic_shape=dynamic)):
        assert "the engine's BackwardPass (test_deepspeed_replaced) is not DeepSpeed's own" in line
        assert line.endswith('; use weight_gradients "in_place"')


def attach_with_own_backward(case: Case) -> str:
    import tf_adapters.deepspeed

    run = PipelineEngine._INSTRUCTION_MAP[host.BackwardPass]

    @functools.wraps(run)  # it looks like DeepSpeed's
    def clipped(engine: Any, buffer_id: int) -> None:
        run(engine, buffer_id)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PipelineEngine._INSTRUCTION_MAP, host.BackwardPass, clipped)
        engine = build_engine(case)
        with pytest.raises(UnsupportedError) as caught:
            tf_adapters.deepspeed.attach(engine)
        return str(caught.value)


@pytest.mark.parametrize("name", REPLACED)
def test_in_place_it_runs_as_without_us(pools: Any, name: str) -> None:
    if name == "another instruction":
        pytest.skip("the engine does not know it, with or without us")
    check_same(pools(2), name, Case(section={}, ratios=0.0))


def test_weight_gradients_wait_in_another_projects_order_where_it_is_kept(pools: Any) -> None:
    case = Case(section=DEFERRED, dynamic_shape=True, ratios=0.0)
    assert all(pool_rank["rewritten"] for pool_rank in check_same(pools(2), "loads first", case))


def test_code_that_gives_the_hosts_own_order_is_no_other_schedule(pools: Any) -> None:
    ours = check_same(pools(2), "as written", Case(section=DEFERRED, ratios=0.0))
    assert all(rank["rewritten"] for rank in ours)


def check_same(pool: Any, name: str, case: Case) -> list[dict[str, Any]]:
    """With a loader that broadcasts where only that other order brings first and last stage together."""
    ours, alone = (pool.run(train_with, name, given) for given in (case, replace(case, section=None)))
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert all(torch.equal(mine["parameters"][n], value) for n, value in theirs["parameters"].items())
    return list(ours)


def train_with(name: str, case: Case) -> dict[str, Any]:
    import tf_adapters.deepspeed

    with pytest.MonkeyPatch.context() as patch:
        (steps(as_written) if name == "as written" else REPLACED[name][0])(patch)
        engine = build_engine(case)
        group = dist.new_group([0, 1]) if name == "loads first" else None
        adapter = tf_adapters.deepspeed.attach(engine)
        if adapter is not None:
            force_plan(adapter.controller, case.ratios)
        losses = [float(engine.train_batch(samples(step, group))) for step in range(3)]
        rewritten = adapter is not None and adapter.controller.execution is not adapter.controller.schedule
        return {"losses": losses, "parameters": parameters_of(engine), "rewritten": rewritten}


def samples(step: int, group: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A batch; with a group the last stage gets its labels from the first one."""
    for tokens, labels in batch(step, 0, 4):
        if group is not None:
            if dist.get_rank() > 0:
                labels.zero_()
            dist.broadcast(labels, 0, group=group)
        yield tokens, labels


# --- what is replaced and goes on ----------------------------------------------------------------------------


def test_another_load_is_called_in_a_plans_order_too(pools: Any) -> None:
    assert pools(2).run(loads_counted, Case(section=DEFERRED, ratios=0.0)) == [12, 12]


def loads_counted(case: Case) -> int:
    import tf_adapters.deepspeed

    loads = []
    run = PipelineEngine._INSTRUCTION_MAP[host.LoadMicroBatch]

    def load(engine: Any, buffer_id: int) -> None:
        loads.append(buffer_id)
        run(engine, buffer_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PipelineEngine._INSTRUCTION_MAP, host.LoadMicroBatch, load)
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine)
        assert adapter is not None
        force_plan(adapter.controller, case.ratios)
        for step in range(3):
            engine.train_batch(samples(step, None))
    return len(loads)


def test_a_batch_of_another_kind_of_schedule_is_refused_before_it_trains(pools: Any) -> None:
    lines = pools(2).run(trained_by_another_schedule, Case(section={}))
    assert lines[0] == lines[1]
    assert "the engine runs a Own of test_deepspeed_replaced, not the TrainSchedule that it chooses" in lines[0]


def trained_by_another_schedule(case: Case) -> str:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    tf_adapters.deepspeed.attach(engine)
    with pytest.raises(UnsupportedError) as caught:
        engine._exec_schedule(Own(engine.micro_batches, engine.num_stages, engine.stage_id))
    return str(caught.value)


# --- shapes that are made unknown ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "resets", "said"),
    [
        (Case(section=DEFERRED), range(6), 1),
        (Case(section=DEFERRED), range(0, 6, 2), 0),
        (Case(section=DEFERRED, dynamic_shape=True), range(6), 0),
        (Case(section={}), range(6), 0),
    ],
    ids=["each batch", "each second batch", "dynamic shapes", "in place"],
)
def test_it_is_said_once_that_nothing_is_deferred(pools: Any, case: Case, resets: range, said: int) -> None:
    case = replace(case, ratios=0.0)
    ours, alone = (pools(2).run(reset_before, replace(case, section=s), resets) for s in (case.section, None))
    for rank, (mine, theirs) in enumerate(zip(ours, alone, strict=True)):
        assert mine["losses"] == theirs["losses"]
        assert len(mine["notes"]) == said
        assert len(mine["lines"]) == (said if rank == 0 else 0)
    if case.dynamic_shape:
        assert all(rank["deferred"] == 6 for rank in ours)


def reset_before(case: Case, resets: range) -> dict[str, Any]:
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    if adapter is not None:
        force_plan(adapter.controller, case.ratios)
    losses, deferred = [], 0
    with Lines() as lines:
        for step in range(6):
            if step in resets:
                engine.reset_activation_shape()
            losses.append(float(engine.train_batch(samples(step, None))))
            deferred += adapter is not None and adapter.controller.state.host_order_step is None
    text = "no weight gradient is deferred"
    return {
        "losses": losses,
        "deferred": deferred,
        "lines": [line for line in lines.seen if text in line],
        "notes": [note for note in adapter.controller.state.notes if text in note] if adapter else [],
    }
