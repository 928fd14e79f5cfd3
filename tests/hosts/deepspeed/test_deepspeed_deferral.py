"""Deferred weight gradients on DeepSpeed's engine: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed_oracle import CASES, CHECKPOINTS_ON_CPU, REPLICATED, check_oracle
from deepspeed_ranks import CONTEXT, Case, batch, build_engine, parameters_of, train
from random_orders import blocking
from run_checks import assert_same

from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed


def deferred(case):
    return replace(case, section={**case.section, "weight_gradients": "deferred"})


@pytest.mark.parametrize("name", [name for name in CASES if name != "one stage"])
def test_masks_and_deferral_together(pools, name):
    case = deferred(CASES[name])
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    ranks = pools(case.stages).run(train, case)
    check_oracle(case, ranks)


@pytest.mark.parametrize("name", ["fp32", "zero1", "bf16", "tied"])
def test_masks_and_deferral_together_with_replicas(pools, name):
    case = deferred(REPLICATED[name])
    check_oracle(case, pools(4).run(train, case))


@pytest.mark.parametrize("name", ["fp32", "gpipe zero1", "bf16", "bf16 immediate", "tied zero1", "reentrant zero1"])
def test_nothing_frozen_is_the_host_to_the_bit(pools, name):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = pools(case.stages).run(train, deferred(case))
    alone = pools(case.stages).run(
        train, replace(case, section={**case.section, "method": "none", "max_freeze_ratio": 0.0}, ratios=None)
    )
    assert_same(ours, alone)
    for mine in ours:
        assert mine["plan"]["ranks"] != mine["schedule"]


# --- forwards stand elsewhere, too ---------------------------------------------------------------------------

MOVED = Case(
    stages=4,
    config={"gradient_accumulation_steps": 8},
    section={"weight_gradients": "deferred", "extra_microbatches": 2},
    ratios=0.0,
)


def test_moved_forwards_and_masks(pools):
    case = replace(MOVED, ratios=0.5, steps=3)
    ranks = pools(4).run(train, case)
    assert any(order(rank["plan"]["ranks"]) != order(rank["schedule"]) for rank in ranks)
    check_oracle(case, ranks)


def order(rows: list[list[str]]) -> list[list[str]]:
    """The forwards and (input) gradients of an order."""
    return [[text.replace("I", "B") for text in row if "W" not in text] for row in rows]


@pytest.mark.parametrize(
    ("event", "case", "ran_host_order"),
    [
        ("blocking", MOVED, [True, False, False, False]),
        ("blocking", replace(MOVED, section={"schedule": "gpipe"}), [True, False, False, False]),
        ("new shapes", MOVED, [True, False, True, False]),
        ("evaluation", MOVED, [True, False, False, False]),
        ("lengths", replace(MOVED, dynamic_shape=True), [False, False, False, False]),
    ],
)
def test_nothing_frozen_is_the_host_to_the_bit_when(pools, event, case, ran_host_order):
    """Blocking transfers are as on devices, at worst: the next one between two ranks waits for those before."""
    ours = pools(4).run(train_through, case, event)
    alone = pools(4).run(train_through, replace(case, section=None), event)
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["failure"] is None
        assert mine["host_order"] == ran_host_order
        assert mine["losses"] == theirs["losses"]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight


def train_through(case: Case, event: str) -> dict[str, Any]:
    """Four steps, with something before the third or all the time."""
    import tf_adapters.deepspeed
    from tf_adapters.hosts.links import Links

    outcome: dict[str, Any] = {"losses": [], "host_order": [], "failure": None}
    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    if adapter is not None:
        force_plan(adapter.controller, case.ratios)
    with pytest.MonkeyPatch.context() as patch:
        if event == "blocking":
            patch.setattr(Links, "send", blocking(Links.send))
            patch.setattr(Links, "receive", blocking(Links.receive))
        for step in range(4):
            if step == 2 and event == "new shapes":
                engine.reset_activation_shape()
            if step == 2 and event == "evaluation":
                outcome["losses"].append(float(engine.eval_batch(iter(batch(99, 0, case.microbatches)))))
            shorter = {"new shapes": range(8) if step >= 2 else (), "lengths": range(0, 8, 2)}.get(event, ())
            samples = [cut(pair) if m in shorter else pair for m, pair in enumerate(batch(step, 0, 8))]
            outcome["losses"].append(float(engine.train_batch(iter(samples))))
            if adapter is not None:
                controller = adapter.controller
                outcome["host_order"].append(controller.state.host_order_step == controller.step - 1)
                outcome["failure"] = controller.state.failure
    return outcome | {"parameters": parameters_of(engine)}


def cut(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:, : CONTEXT // 2] for tensor in sample)
