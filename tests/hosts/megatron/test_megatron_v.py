"""Two chunks on each rank in a V: the same training as 1F1B and interleaving, with and without an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_oracle import BF16, BF16_OPTIMIZER, GATHER, GATHER_OPTIMIZER, OVERLAP
from megatron_ranks import (
    Case,
    build_chunks,
    build_optimizer,
    evaluation,
    initialize,
    innermost,
    main_gradient,
    run_batch,
    zero_gradients,
)
from random_orders import random_order

from tf_adapters.errors import ConfigError
from tf_adapters.megatron.placement import PipelinePosition, VLayout, even_layout, v_forwards, v_order
from tf_adapters.schedule.ir import Kind
from tf_adapters.testing import force_order, force_plan

EXACT = {"goal": "exact", "max_freeze_ratio": 0.0, "warmup_steps": 1, "monitoring_steps": 2, "on_error": "raise"}
HALF = {**EXACT, "extra_microbatches": -2}


# --- on one process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_last_rank_has_the_first_stage_and_the_last(size: int) -> None:
    stages = [PipelinePosition(rank, size, 2, in_v=True).stages for rank in range(size)]
    assert stages[-1] == (0, 2 * size - 1)
    assert stages[0] == (size - 1, size)
    assert sorted(stage for of_rank in stages for stage in of_rank) == list(range(2 * size))
    order = v_order(size, 2 * size)
    assert [order.stages_of(rank) for rank in range(size)] == stages


def test_an_evaluation_has_every_forward_once() -> None:
    actions = v_forwards(2, 3).actions
    assert len(set(actions)) == len(actions) == 4 * 3
    assert {action.kind for action in actions} == {Kind.FORWARD}


@pytest.mark.parametrize(
    ("layers", "size", "output", "expected"),
    [
        (8, 2, 0.0, "Ett|tt|tt|ttL"),
        (9, 2, 0.0, "Ett|ttt|tt|ttL"),
        (8, 2, 1.0, "Ett|ttt|tt|tL"),
        (4, 2, 3.0, "Et|t|t|tL"),
    ],
)
def test_layers_are_shared_out_evenly_but_for_the_last_stage(
    layers: int, size: int, output: float, expected: str
) -> None:
    assert even_layout(layers, size, output) == expected


def test_too_few_layers_and_a_wrong_number_of_stages_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r'--num-layers is 3: allowed with placement "v" is at least 4'):
        even_layout(3, 2)
    with pytest.raises(ConfigError, match=r'has 3 stages: allowed with placement "v" are 4'):
        VLayout("Et|t|tL", 2)


def test_layers_are_numbered_in_the_order_of_the_stages() -> None:
    layout = VLayout("Et|tt|ttt|L", 2)
    layout.validate_layer_layout(6, None)
    assert [layout.layout[rank][chunk].count(layout.layout[0][0][0]) for rank in (0, 1) for chunk in (0, 1)] == [
        2,
        3,
        1,
        0,
    ]


# --- real ranks ------------------------------------------------------------------------------------------------

BASE = Case(layers=4, section=None)
SETTINGS = {
    "untied": {},
    "tied": {"tied": True},
    "bf16": {"model": BF16, "optimizer": BF16_OPTIMIZER},
    "recomputed": {
        "model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
    "tokens counted": {"model": {"calculate_per_token_loss": True}},
    "tensor 2, tied": {"tp": 2, "tied": True, "model": {"sequence_parallel": True}},
    "replicas 2, overlap, tied": {"ddp": OVERLAP, "tied": True},
    "replicas 2, gather, tied": {
        "ddp": {**GATHER, "align_param_gather": True},
        "align": True,
        "optimizer": GATHER_OPTIMIZER,
        "tied": True,
    },
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", SETTINGS)
def test_a_v_trains_as_1f1b_and_interleaving_do_to_the_bit(megatron, name: str) -> None:
    case = replace(BASE, **SETTINGS[name])
    pool = megatron(4 if case.tp > 1 or name.startswith("replicas") else 2)
    ways = {
        "1F1B": case,
        "interleaved": replace(case, vp=2),
        "V": replace(case, vp=2, v=True),
        "V, exact": replace(case, vp=2, v=True, section=EXACT),
    }
    if not case.tied:  # stages that share a weight keep their order
        ways["V, half of the memory"] = replace(case, vp=2, v=True, section=HALF)
    found = {way: merged(pool.run(trained, of_way)) for way, of_way in ways.items()}
    for way, (losses, tensors) in found.items():
        expected_losses, expected = found["1F1B"]
        assert losses == expected_losses, way
        assert tensors.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(tensors[key], value), (way, key)


@pytest.mark.distributed
def test_after_detach_the_chunks_still_run_in_a_v(megatron) -> None:
    case = replace(BASE, vp=2, v=True)
    ours = merged(megatron(2).run(trained, replace(case, section=EXACT), True))
    alone = merged(megatron(2).run(trained, case))
    assert ours[0] == alone[0]
    assert all(torch.equal(ours[1][key], value) for key, value in alone[1].items())


def merged(ranks: list[dict[str, Any]]) -> tuple[list[Any], dict[Any, torch.Tensor]]:
    """The losses, and what all ranks hold by the name that a checkpoint would give it."""
    losses = [rank["losses"] for rank in ranks if any(rank["losses"][0])]
    return losses, {key: value for rank in ranks for key, value in rank["tensors"].items()}


def trained(case: Case, detaches: bool = False) -> dict[str, Any]:
    """Train from weights that depend on their names only."""
    import tf_adapters.megatron
    from benchmarks.shared.megatron_weights import fill_by_name

    initialize(case)
    chunks = build_chunks(case)
    for chunk in chunks:
        fill_by_name(chunk)
    optimizer = build_optimizer(case, chunks)
    adapter = None
    if case.section is not None:
        adapter = tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=case.microbatches)
    losses: list[Any] = []
    tensors: dict[Any, torch.Tensor] = {}
    for step in range(6):
        if case.section == HALF and step == 1:
            force_plan(adapter.controller, 0.0)
        elif adapter is not None and case.section != HALF and step > 0:
            force_order(adapter.controller, random_order(adapter.controller.schedule, seed=step))
        zero_gradients(chunks, optimizer)
        entries = run_batch(case, chunks, step, range(case.microbatches))
        losses.append([float(entry["loss"]) for entry in entries])
        if step == 5:
            # A shard's gradients are where its bucket is, and that differs.
            whole = {} if case.ddp.get("use_distributed_optimizer") else named(chunks)
            tensors |= {("gradient", *key): main_gradient(p) for key, p in whole.items()}
        optimizer.step()
        losses.append(evaluation(case, chunks, step))
        if detaches and step == 3:
            adapter.detach()
            adapter = None
    tensors |= {("weight", *key): p.detach().clone() for key, p in named(chunks).items()}
    if adapter is not None:
        assert adapter.controller.state.failure is None
        adapter.detach()
    return {"losses": losses, "tensors": tensors}


def named(chunks: list[Any]) -> dict[Any, Any]:
    """This rank's parameters by the place of their layer in the whole model."""
    from megatron.core import parallel_state

    from benchmarks.shared.megatron_weights import whole_name

    place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    return {
        (place, whole_name(innermost(chunk), name)): parameter
        for chunk in chunks
        for name, parameter in innermost(chunk).named_parameters()
    }


@pytest.mark.distributed
def test_a_v_is_refused_where_it_comes_too_late_or_was_not_built(megatron) -> None:
    lines = megatron(2).run(refusals)
    assert lines[0] == lines[1]
    too_late, not_built = lines[0]
    assert "comes too late: Megatron has made its process groups already" in too_late
    assert 'timely_freeze.placement is "v", but the model was not built in a V' in not_built


def refusals() -> list[str]:
    import tf_adapters.megatron
    from tf_adapters.errors import TimelyFreezeError

    case = replace(BASE, vp=2)
    initialize(case)
    found = []
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks)
    for refused in (
        tf_adapters.megatron.place_in_v,
        lambda: tf_adapters.megatron.attach(chunks, optimizer, {"placement": "v"}, num_microbatches=4),
    ):
        try:
            refused()
        except TimelyFreezeError as error:
            found.append(str(error))
    dist.barrier()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("v", [False, True], ids=["interleaved", "V"])
def test_outputs_that_a_loop_collects_are_whole_and_a_batch_leaves_nothing(megatron, v: bool) -> None:
    case = replace(BASE, vp=2, v=v, section=EXACT)
    shapes, left = zip(*megatron(2).run(collected, case), strict=True)
    assert shapes[-1] == [(2, case.context)] * case.microbatches
    assert left == (0, 0)


def collected(case: Case) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of an evaluation's outputs on this rank, and the objects of batches that are left."""
    import gc

    import tf_adapters.megatron
    from tf_adapters.hosts.runner import RowRunner
    from tf_adapters.megatron.ordered import OrderedBatch

    initialize(case)
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks)
    adapter = tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=case.microbatches)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            if step > 0:
                force_order(adapter.controller, random_order(adapter.controller.schedule, seed=step))
            zero_gradients(chunks, optimizer)
            run_batch(case, chunks, step, range(case.microbatches))
            optimizer.step()
        with torch.no_grad():
            outputs = run_batch(
                case, chunks, 9, range(case.microbatches), forward_only=True, collect_non_loss_data=True
            )
        left = sum(isinstance(thing, (OrderedBatch, RowRunner)) for thing in gc.get_objects())
    finally:
        gc.enable()
        adapter.detach()
    return [tuple(output.shape) for output in outputs], left
