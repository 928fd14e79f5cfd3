"""Two stages on each rank in a V on DeepSpeed's DualPipeV engine: our order, the host's gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed_oracle import BF16, CHECKPOINTS_ON_CPU, REENTRANT, ZERO1, check_oracle
from deepspeed_orders import EXACT, SAME_BITS, in_random_orders
from deepspeed_ranks import Case, build_engine, train
from run_checks import assert_same

from tf_adapters.schedule.deferral import most_in_flight
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.schedule.orders import v_with_whole_backwards

pytestmark = pytest.mark.distributed
pytest.importorskip("deepspeed.runtime.pipe.dualpipev")

V = {"placement": "v", "weight_gradients": "deferred"}
CASES = {
    "fp32": Case(dualpipev=True, section=V, ratios=0.5, steps=3),
    "in place": Case(dualpipev=True, section={"placement": "v"}, ratios=0.5, steps=3),
    "sampled tokens": Case(dualpipev=True, section={**V, "granularity": "token"}, ratios=0.5, steps=3),
    "zero1": Case(dualpipev=True, section=V, config=ZERO1, ratios=0.5, steps=3),
    "bf16": Case(dualpipev=True, section=V, config={**BF16, **ZERO1}, ratios=0.5, steps=3),
    "clipping": Case(dualpipev=True, section=V, config={**ZERO1, "gradient_clipping": 0.1}, ratios=0.5, steps=3),
    "six microbatches": Case(dualpipev=True, section=V, config={"gradient_accumulation_steps": 6}, ratios=0.6, steps=3),
    "everything frozen": Case(dualpipev=True, section=V, ratios=1.0, steps=3),
    "tied": Case(dualpipev=True, section=V, tied=True, ratios=0.8, steps=3),
    "tied zero1": Case(dualpipev=True, section=V, tied=True, config=ZERO1, ratios=0.8, steps=3),
    "reentrant": Case(dualpipev=True, section=V, config=REENTRANT, ratios=0.7, steps=3),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_and_deferral_together(pools, name):
    case = CASES[name]
    if "pipeline" in case.config and not CHECKPOINTS_ON_CPU:
        pytest.skip("activation checkpointing needs a device in this DeepSpeed, with or without us")
    ranks = pools(2).run(train, case)
    check_oracle(case, ranks)
    assert ranks[0]["schedule"] == v_with_whole_backwards(2, case.microbatches).to_text()
    if case.section.get("weight_gradients") == "deferred":
        assert any("W" in text for row in ranks[0]["plan"]["ranks"] for text in row)


@pytest.mark.parametrize("config", [{}, ZERO1], ids=["fp32", "zero1"])
def test_with_replicas(pools, config):
    case = Case(dualpipev=True, section=V, config=config, ratios=0.6, steps=3)
    check_oracle(case, pools(4).run(train, case))


@pytest.mark.parametrize("name", SAME_BITS)
def test_any_order_is_the_host_to_the_bit(pools, name):
    case = SAME_BITS[name]
    ours = pools(case.stages).run(in_random_orders, case)
    alone = pools(case.stages).run(in_random_orders, replace(case, section=None))
    assert all(sum(rank["moved"]) > case.steps / 2 for rank in ours)
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        for weight, value in theirs["parameters"].items():
            assert torch.equal(mine["parameters"][weight], value), weight


@pytest.mark.parametrize("name", ["four ranks", "four ranks, zero1, bf16"])
def test_with_half_of_the_memory_it_is_the_host_to_the_bit(pools, name):
    case = replace(SAME_BITS[name], steps=3, ratios=0.0)
    ours = pools(4).run(train, replace(case, section={**V, "extra_microbatches": -4}))
    alone = pools(4).run(
        train, replace(case, section={"placement": "v", "method": "none", "max_freeze_ratio": 0.0}, ratios=None)
    )
    assert_same(ours, alone)
    for mine in ours:
        assert mine["status"] is None
        assert most_in_flight(PipelineSchedule.from_text(mine["plan"]["ranks"])) == 4


def test_a_v_needs_a_module_in_a_v(pools) -> None:
    lines = pools(2).run(refused)
    assert lines[0] == lines[1]
    assert lines[0][0] == (
        'timely_freeze.placement is "v": allowed is "host" here; build a deepspeed.pipe.DualPipeVModule instead of the '
        "PipelineModule"
    )
    assert 'DualPipeV keeps weight gradients in its backwards; use placement "v"' in lines[0][1]


def refused() -> list[str]:
    import tf_adapters.deepspeed
    from tf_adapters.errors import TimelyFreezeError

    found = []
    for case in (Case(section=EXACT), Case(dualpipev=True, section={"weight_gradients": "deferred"})):
        try:
            tf_adapters.deepspeed.attach(build_engine(case))
        except TimelyFreezeError as error:
            found.append(str(error))
    return found
