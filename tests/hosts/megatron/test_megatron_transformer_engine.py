"""Megatron-Core with Transformer Engine's layers on two pipeline ranks: masks, and deferred weight gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
from logged import Lines
from megatron_oracle import (
    BF16,
    BF16_OPTIMIZER,
    FULL,
    FUSED,
    GATHER,
    GATHER_OPTIMIZER,
    MOE,
    OVERLAP,
    SHARDED,
    check_oracle,
    check_same,
)
from megatron_ranks import Case, setup_engine, start, teardown, train, train_step
from megatron_reductions import reductions
from rank_pools import fork_ranks
from run_checks import assert_tokens_drawn

from tf_adapters.measuring.phase import Phase
from tf_adapters.report import Report
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.transformer_engine_on_cpu import FOLDER

pytestmark = pytest.mark.distributed

DEFERRED = {"weight_gradients": "deferred", "extra_microbatches": 0}
GROUPED = {**MOE, "moe_grouped_gemm": True}
CASES = {
    "1f1b": Case(ratios=0.5),
    "fused": Case(ratios=0.5, model=FUSED),
    "interleaved": Case(vp=2, ratios=0.5),
    "interleaved, fused": Case(vp=2, ratios=0.5, model=FUSED),
    "full recompute": Case(ratios=0.7, model=FULL),
    "distributed optimizer": Case(ratios=0.5, ddp=SHARDED, optimizer=SHARDED),
    "experts": Case(ratios=0.5, model=GROUPED),
    "experts, fused": Case(ratios=0.5, model={**GROUPED, **FUSED}),
    "replicas, overlap": Case(pp=1, layers=2, ratios=0.5, ddp=OVERLAP, steps=3),
    "replicas, overlap, fused": Case(pp=1, layers=2, ratios=0.5, ddp=OVERLAP, model=FUSED, steps=3),
    "replicas, gather, fused": Case(
        pp=1, layers=2, ratios=0.8, ddp=GATHER, optimizer=GATHER_OPTIMIZER, model=FUSED, steps=3
    ),
    "sequence parallel": Case(pp=1, tp=2, layers=2, ratios=0.5, model={"sequence_parallel": True}),
    "bf16": Case(ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "bf16, fused": Case(ratios=0.5, model={**BF16, **FUSED}, optimizer=BF16_OPTIMIZER),
    "tied": Case(tied=True, ratios=0.8),
    "tied, fused": Case(tied=True, ratios=0.8, model=FUSED),
    "no pipelining, bf16": Case(pp=1, layers=2, ratios=0.5, model=BF16, optimizer=BF16_OPTIMIZER),
    "no pipelining, tied": Case(tied=True, pp=1, layers=2, ratios=0.5),
    "interleaved, tied": Case(tied=True, vp=2, ratios=0.8),
    "interleaved, experts": Case(vp=2, ratios=0.5, model=GROUPED),
    "expert parallel": Case(pp=1, ep=2, layers=2, ratios=0.6, model=MOE),
    "expert parallel, grouped, fused": Case(pp=1, ep=2, layers=2, ratios=0.6, model={**GROUPED, **FUSED}),
    "expert parallel, grouped, overlap": Case(pp=1, ep=2, layers=2, ratios=0.6, model=GROUPED, ddp=OVERLAP, steps=3),
}
FOUR_RANKS = {
    "pipeline 2, tensor 2": Case(tp=2, ratios=0.6),
    "pipeline 2, tensor 2, fused": Case(tp=2, ratios=0.6, model=FUSED),
    "pipeline 2, tied, sequence parallel 2": Case(tp=2, tied=True, ratios=0.6, model={"sequence_parallel": True}),
    "interleaved, tensor 2, bf16": Case(vp=2, tp=2, ratios=0.6, model=BF16, optimizer=BF16_OPTIMIZER),
    "pipeline 2, expert parallel 2": Case(ep=2, ratios=0.6, model=GROUPED),
    "interleaved, sequence parallel 2": Case(vp=2, tp=2, ratios=0.6, model={"sequence_parallel": True}),
    "interleaved, expert parallel 2": Case(vp=2, ep=2, ratios=0.6, model=GROUPED),
}


def with_engine(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: replace(case, engine=True, steps=case.steps if case.ddp else 2) for name, case in cases.items()}


CASES, FOUR_RANKS = with_engine(CASES), with_engine(FOUR_RANKS)


def ranks(size: int) -> RankPool:
    if importlib.util.find_spec("transformer_engine") is None and not FOLDER.exists():
        pytest.skip("no Transformer Engine here: make puts it into a folder of its own")
    return fork_ranks(size, setup_engine, teardown)


@pytest.fixture(scope="module")
def engine() -> Iterator[RankPool]:
    with ranks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with ranks(4) as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_masks_in_place(engine, name):
    check_oracle(CASES[name], engine.run(train, CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_masks_and_deferral_together(engine, name):
    case = replace(CASES[name], section=DEFERRED)
    check_oracle(case, engine.run(train, case))


@pytest.mark.parametrize("name", CASES)
def test_nothing_frozen_is_the_host_to_the_bit(engine, name):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = engine.run(train, replace(case, section=DEFERRED), False, True)
    check_same(ours, engine.run(train, replace(case, section=None, ratios=None), False, True))


SAMPLED = {"granularity": "token"}


def check_tokens(case: Case, ranks: list[dict]) -> None:
    check_oracle(case, ranks)
    assert_tokens_drawn(ranks)
    layers = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    for rank in ranks:
        names = {name for of_microbatch in rank["draws"].values() for name in of_microbatch}
        assert layers <= {name.split(".")[-2] for name in names}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_drawn_tokens(engine, name):
    case = replace(CASES[name], section=SAMPLED)
    check_tokens(case, engine.run(train, case))


@pytest.mark.parametrize("name", ["1f1b", "fused", "experts", "experts, fused", "interleaved", "bf16, fused"])
def test_gradients_are_those_of_the_drawn_tokens_where_they_wait(engine, name):
    case = replace(CASES[name], section={**DEFERRED, **SAMPLED})
    check_tokens(case, engine.run(train, case))


@pytest.mark.parametrize("name", ["1f1b", "fused", "experts", "bf16"])
def test_no_token_left_out_is_the_host_to_the_bit(engine, name):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = engine.run(train, replace(case, section=SAMPLED), False)
    check_same(ours, engine.run(train, replace(case, section=None, ratios=None), False))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_sample_tokens(four, name):
    case = replace(FOUR_RANKS[name], section=SAMPLED)
    check_tokens(case, four.run(train, case))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(four, name):
    case = replace(FOUR_RANKS[name], section=DEFERRED)
    check_oracle(case, four.run(train, case))
    exact, alone = replace(case, ratios=0.0), replace(case, section=None, ratios=None)
    check_same(four.run(train, exact, False), four.run(train, alone, False))


def first_step(case: Case) -> tuple[dict[int, float], dict[int, dict[str, str]], set[str]]:
    """What the first step finds: the share that can wait, what is left to the host, and the parameters' names."""
    chunks, optimizer, adapter = start(case)
    train_step(case, chunks, optimizer, 0)
    findings = adapter.controller.state.taps
    names = {name.split("layers.0.")[-1] for taps in adapter.controller.pipeline.taps.values() for name in taps.names}
    return dict(findings.shares), dict(findings.left), {name for name in names if "weight" in name}


@pytest.mark.parametrize("section", [DEFERRED, SAMPLED], ids=["deferred", "sampled"])
@pytest.mark.parametrize("name", ["1f1b", "fused", "experts"])
def test_most_of_the_weight_gradient_work_can_wait_or_be_sampled(engine, name, section):
    case = replace(CASES[name], section=section, ratios=None)
    for shares, left, names in engine.run(first_step, case):
        assert left == {}
        assert min(shares.values()) > 0.8
        assert {"self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"} <= names


def measured(case: Case) -> tuple[list[str], int]:
    """Train until the plan is in force, on an emulated device: our log, and how many products the device has seen."""
    with Lines() as log, EmulatedDevice(1e9) as device:
        chunks, optimizer, adapter = start(case)
        for step in range(8):
            train_step(case, chunks, optimizer, step)
        adapter.detach()
    return log.seen, device.operations


@pytest.mark.parametrize("model", [{}, FUSED], ids=["unfused", "fused"])
def test_a_measured_run_shows_the_share_that_can_wait(engine, tmp_path, model):
    case = replace(CASES["1f1b"], section=DEFERRED, ratios=None, model=model, output_dir=str(tmp_path))
    [(said, operations), _] = engine.run(measured, case)
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert report.host.device == "emulated"
    assert min(report.tapped_share[stage] for stage in ("0", "1")) >= 0.8
    shares = dict.fromkeys(f"{share:.0%}" for share in sorted(report.tapped_share.values()))
    line = f"{' to '.join(shares)} of a stage's weight-gradient work can wait"
    assert f"timely_freeze: {line}" in said
    assert report.plan is not None
    assert min(report.plan.deferrable_share.values()) > 0.0
    assert any("deferral: weight gradients that can wait are" in line for line in said)
    assert operations >= 8 * 4 * 2 * 4 * 3  # of 8 steps, 4 microbatches, 2 layers: 4 linear layers, 3 products each


@pytest.mark.parametrize("model", [{}, FUSED], ids=["unfused", "fused"])
def test_every_bucket_is_reduced_once_its_last_gradient_is_there(four, model):
    ratios = {f"{stage}B{m}": 0.5 for stage in range(2) for m in range(4)}
    case = Case(ddp=OVERLAP, section=DEFERRED, ratios=ratios, steps=3, model=model, engine=True)
    late = [names for steps in four.run(reductions, case) for step in steps[1:] for names in step]
    assert any("waited" in names for names in late)
    for names in late:  # a frozen weight may have waiting gradients of other microbatches until the last of them
        assert "frozen" not in names[names.index("waited") :] if "waited" in names else True, names


def memory(case: Case) -> dict[str, float]:
    """Bytes of a rank: its planned and its measured peak, and the waiting weight gradients of a microbatch.

    Peaks are above what the process holds between batches, which grows with the plan's own Python objects.
    """
    chunks, optimizer, adapter = start(case)
    for step in range(case.steps):
        train_step(case, chunks, optimizer, step)
    meter, plan = adapter.controller.memory, adapter.controller.state.batch
    [stage] = adapter.controller.parameter_masks
    before, after = (meter.held(phase) for phase in (Phase.MONITORING_UPPER, Phase.STABLE))
    planned, measured = plan.planned_peak_bytes(meter, stage), meter.peak_bytes(Phase.STABLE)
    adapter.detach()
    return {
        "planned": planned - before.base,
        "measured": measured - after.base,
        "waiting": before.waiting[stage],
    }


def test_gathered_inputs_that_wait_are_in_the_planned_memory(four):
    """Under sequence parallelism a waiting gradient keeps its whole gathered input."""
    section = {**DEFERRED, "max_freeze_ratio": 0.0, "extra_microbatches": 2, "replan_threshold": 0.0}
    section |= {"monitoring_steps": 4, "progressive_steps": 0}
    model = {"hidden_size": 128}
    case = Case(tp=2, engine=True, context=128, steps=8, model=model, section=section)
    parallel = replace(case, model={**model, "sequence_parallel": True})
    for rank, alone in zip(four.run(memory, parallel), four.run(memory, case), strict=True):
        assert rank["measured"] == pytest.approx(rank["planned"], rel=0.1)
        assert rank["waiting"] > 0.9 * alone["waiting"]
