"""Layers compiled with torch.compile, one by one, frozen whole: their gradients, and how often they are compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch_oracle import check_oracle
from torch_ranks import Case, attached, pool, train

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.layers import blocks, layers_of
from tf_adapters.hosts.support import compiled_problem
from tf_adapters.selection.freeze_units import FreezeUnit

BLOCKS = {"granularity": "block"}
WARMUP, STEPS = 3, 12
MICROBATCHES = 8
"""Enough for all states of the layers of a stage: one step of the warm-up shows them."""
PLANS = (0.5, {"0": 1.0, "1": 0.8}, {"0.1": 1.0, "1": 0.4}, 1.0)
distributed = pytest.mark.distributed


# --- training -----------------------------------------------------------------------------------------------------


@distributed
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleGPipe"])
def test_the_gradients_are_those_of_the_masks(schedule: str) -> None:
    case = Case(schedule=schedule, section=BLOCKS, ratios=PLANS, steps=len(PLANS), compiled=True)
    check_oracle(replace(case, compiled=False), pool(2).run(train, case))


@distributed
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_nothing_is_compiled_after_the_warm_up(schedule: str) -> None:
    """Every layer has been in every state by then: frozen or not, behind layers that need gradients or not."""
    section = {**BLOCKS, "warmup_steps": WARMUP, "monitoring_steps": 4, "progressive_steps": 2}
    case = Case(schedule=schedule, microbatches=MICROBATCHES, section=section, compiled=True)
    of_ranks = pool(2).run(compilations, case)
    assert any(masked[-1] for _, masked, _ in of_ranks)  # where, the measured times decide
    for compiled, masked, failure in of_ranks:
        assert failure is None
        assert compiled[0] > 0
        assert compiled[WARMUP - 1 :] == [compiled[-1]] * (STEPS - WARMUP + 1)
        assert masked[: WARMUP - 1] == [False] * (WARMUP - 1)
        assert masked[WARMUP - 1]


@distributed
def test_without_freezing_the_warm_up_freezes_nothing_either() -> None:
    section = {**BLOCKS, "warmup_steps": WARMUP, "monitoring_steps": 4, "progressive_steps": 2, "max_freeze_ratio": 0.0}
    for _, masked, failure in pool(2).run(
        compilations, Case(microbatches=MICROBATCHES, section=section, compiled=True)
    ):
        assert failure is None
        assert not any(masked)


def compilations(case: Case) -> tuple[list[int], list[bool], str | None]:
    """After each step, how many graphs this rank has compiled; whether it froze anything; the failure."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = attached(case)
    controller = run.adapter.controller
    compiled, masked = [], []
    for step in range(STEPS):
        stages = [stage.stage_index for stage in run.stages]
        names = [controller.frozen_parameters(controller.step, s, m) for s in stages for m in range(case.microbatches)]
        run.train_step(step)
        compiled.append(counters["stats"]["unique_graphs"])
        masked.append(any(names))
    failure = controller.state.failure
    run.adapter.detach()
    return compiled, masked, failure


# --- layers as units ----------------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])


def test_units_are_joined_by_layer() -> None:
    stage = Stage()
    units = [FreezeUnit((name,), float(p.numel()), tuple(p.shape)) for name, p in stage.named_parameters()]
    joined = blocks([*units, FreezeUnit(("temperature",), 1.0, (1,), cap=0.5)], layers_of(stage))
    assert [unit.names for unit in joined] == [
        ("embedding.weight",),
        ("layers.0.0.weight", "layers.0.0.bias"),
        ("layers.1.0.weight", "layers.1.0.bias"),
        ("temperature",),
    ]
    assert [unit.work for unit in joined] == [6.0, 6.0, 6.0, 1.0]
    assert joined[-1].cap == 0.5


# --- what is refused ------------------------------------------------------------------------------------------------


def problem(compile_what: str, **settings: Any) -> str | None:
    stage = Stage()
    dict(stage.named_modules())[compile_what].compile(backend="eager")
    return compiled_problem(nn.Sequential(stage), stage, layers_of(stage), TimelyFreezeConfig(**settings))


def test_layers_may_be_compiled_where_they_are_frozen_whole() -> None:
    assert problem("layers.1", granularity="block") is None
    assert problem("layers.1.0", granularity="block") is None
    assert "granularity" in (problem("layers.1") or "")


def test_a_whole_stage_may_not_be_compiled() -> None:
    assert (problem("", granularity="block") or "").startswith("a whole stage is compiled with torch.compile")


def test_compiled_layers_do_not_defer() -> None:
    text = problem("layers.0", granularity="block", weight_gradients="deferred")
    assert text is not None
    assert text.endswith('use weight_gradients "in_place"')


def test_granularity_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="granularity"):
        TimelyFreezeConfig(granularity="blocks")
