"""Deferred weight gradients in Megatron's schedules: the same bits as the host alone, and the oracle's with masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_oracle import FOUR_RANKS, TWO_RANKS, check_oracle, check_same
from megatron_ranks import Case, by_name, run_batch, start, train, train_step, values
from random_orders import blocking

from tf_adapters.schedule.deferral import keeps_order
from tf_adapters.schedule.ir import Action, PipelineSchedule

pytestmark = pytest.mark.distributed

CASES = {**TWO_RANKS, **FOUR_RANKS}
EXACT = [
    "1f1b",
    "interleaved",
    "fused gradients",
    "tied",
    "full recompute",
    "bf16",
    "distributed optimizer",
    "experts",
    "pipeline 4",
    "pipeline 2, sequence parallel 2",
    "pipeline 2, replicas 2, overlap",
    "pipeline 2, replicas 2, aligned reduce",
    "interleaved groups of 3, 8 microbatches",
    "interleaved, three chunks",
    "full recompute, interleaved",
    "interleaved, experts",
    "pipeline 4, interleaved",
    "interleaved, replicas 2, gather",
    "interleaved, replicas 2, overlap, tied",
    "V",
    "V of 8",
    "V, bf16",
    "V, replicas 2, gather",
    "V, sequence parallel 2, tied",
]
EXTRA = {
    "1f1b": 2,
    "bf16": 2,
    "distributed optimizer": 2,
    "full recompute": 2,
    "tied": 2,
    "pipeline 2, replicas 2, overlap": 2,
    "pipeline 2, sequence parallel 2": 2,
    "pipeline 4": 4,
}
"""Where forwards are moved as well."""
MORE = [
    *(("1f1b", extra) for extra in (0, 4, -1)),
    *(("pipeline 4", extra) for extra in (0, 2, -2)),
    *(("pipeline 4, interleaved", extra) for extra in (-4,)),
    ("interleaved", 0),
]


def deferred(case: Case, extra: int = 0, **settings: Any) -> Case:
    section = {"weight_gradients": "deferred", "extra_microbatches": extra, **settings}
    return replace(case, section={**(case.section or {}), **section})


def ranks(name: str) -> int:
    return 4 if name in FOUR_RANKS else 2


def moves_forwards(plan: list[list[str]], host: list[list[str]]) -> bool:
    """Whether an order differs from the host's by more than where weight gradients are."""
    return not keeps_order(PipelineSchedule.from_text(host), PipelineSchedule.from_text(plan))


@pytest.mark.parametrize("name", CASES)
def test_masks_and_deferral_together(megatron, name):
    case = deferred(CASES[name], EXTRA.get(name, 0))
    outcomes = megatron(ranks(name)).run(train, case)
    check_oracle(case, outcomes)
    assert moves_forwards(outcomes[0]["plan"]["ranks"], outcomes[0]["schedule"]) == (name in EXTRA)


@pytest.mark.parametrize(("name", "extra"), [*((name, EXTRA.get(name, 0)) for name in EXACT), *MORE])
def test_nothing_frozen_is_the_host_to_the_bit(megatron, name, extra):
    case = replace(CASES[name], ratios=0.0, steps=3)
    ours = megatron(ranks(name)).run(train, deferred(case, extra), False, True)
    check_same(ours, megatron(ranks(name)).run(train, replace(case, section=None, ratios=None), False, True))
    assert moves_forwards(ours[0]["plan"]["ranks"], ours[0]["schedule"]) == bool(extra)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("pipeline 4", {"deallocate_pipeline_outputs": False}),
        ("pipeline 4, interleaved", {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
        (
            "pipeline 4, interleaved",
            {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": True},
        ),
        (
            "pipeline 2, replicas 2, aligned reduce",
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
                "num_microbatches_with_partial_activation_checkpoints": 1,
                "calculate_per_token_loss": False,
            },
        ),
    ],
    ids=["outputs kept", "overlapped transfers", "all transfers overlapped", "some microbatches recomputed"],
)
def test_moved_forwards_under_more_of_the_hosts_options(megatron, name, model):
    case = replace(CASES[name], ratios=0.0, steps=2, model=model)
    ours = megatron(4).run(train, deferred(case, 4), False)
    check_same(ours, megatron(4).run(train, replace(case, section=None, ratios=None), False))


# --- around the ordered batch ----------------------------------------------------------------------------------

MOVED = deferred(replace(FOUR_RANKS["pipeline 4"], ratios=0.0), 4)


@pytest.fixture(scope="module")
def alone(megatron):
    """Four steps of the host by itself."""
    return megatron(4).run(train_through, replace(MOVED, section=None, ratios=None), "as ever")


def test_transfers_that_block_their_rank_run_the_same_order(megatron, alone):
    """As on devices, at worst: the next transfer, or a device that is waited for, waits for those before."""
    check_same(megatron(4).run(train_through, MOVED, "blocking"), alone)


def test_a_communicator_of_the_loops_own_runs_the_same_order(megatron, alone):
    check_same(megatron(4).run(train_through, MOVED, "own communicator"), alone)


def test_transfers_that_cannot_be_left_out_keep_the_hosts_order(megatron, alone):
    ours = megatron(4).run(train_through, replace(MOVED, section={**MOVED.section, "on_error": "warn"}), "subclass")
    check_same(ours, alone)
    assert all("did not run the schedule" in rank["failure"] for rank in ours)


def test_what_fails_on_one_rank_brings_the_hosts_order_back_on_all(megatron, alone):
    ours = megatron(4).run(train_through, replace(MOVED, section={**MOVED.section, "on_error": "warn"}), "failure")
    check_same(ours, alone)
    assert all("did not run the schedule" in rank["failure"] for rank in ours)
    assert all(rank["host_order"] for rank in ours)


def test_detached_the_host_runs_its_own_order(megatron, alone):
    check_same(megatron(4).run(train_through, MOVED, "detached"), alone)


def test_an_error_of_the_users_passes_and_the_next_batch_is_whole(megatron, alone):
    ours = megatron(4).run(train_through, MOVED, "user's error")
    assert all(rank["raised"] for rank in ours)
    check_same(ours, alone)


def train_through(case: Case, event: str) -> dict[str, Any]:
    """Four steps, with something after the first or all the time."""
    from tf_adapters.hosts.links import Links

    outcome: dict[str, Any] = {"steps": [], "raised": False}
    with pytest.MonkeyPatch.context() as patch:
        if event == "blocking":
            patch.setattr(Links, "send", blocking(Links.send))
            patch.setattr(Links, "receive", blocking(Links.receive))
        chunks, optimizer, adapter = start(case)
        given = communicator(chunks, event) if event in ("own communicator", "subclass") else {}
        for step in range(4):
            if step == 0 and event == "failure" and torch.distributed.get_rank() == 1:
                patch.setattr(adapter.controller, "_executed", _Forgetful())
            if step == 1 and event == "user's error":
                outcome["raised"] = interrupted(case, chunks)
            if step == 2 and event == "detached":
                adapter.detach()
                adapter = None
            losses = train_step(case, chunks, optimizer, step, **given)
            outcome["steps"].append({"losses": losses, "after": by_name(case, chunks, values)})
    if adapter is not None:
        controller = adapter.controller
        outcome |= {
            "failure": controller.state.failure,
            "host_order": controller.execution is controller.schedule,
        }
        adapter.detach()
    return outcome


class _Forgetful(list[Action]):
    """A record of what ran that lacks it."""

    def append(self, action: Action) -> None:
        pass


def communicator(chunks: list[Any], event: str) -> dict[str, Any]:
    """What Megatron-LM gives the schedule from 0.19 on."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    class Other(P2PCommunicator):
        def _communicate(self, **kwargs: Any) -> Any:
            return super()._communicate(**kwargs)

    make = P2PCommunicator if event == "own communicator" else Other
    group = parallel_state.get_pipeline_model_parallel_group()
    return {
        "p2p_communicator": make(pp_group=group, config=get_model_config(chunks[0])),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }


def interrupted(case: Case, chunks: list[Any]) -> bool:
    """A batch that ends on all ranks with the error of a rank's first forward: whether it did."""
    from megatron.core import parallel_state

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("the user's")

    first = parallel_state.is_pipeline_first_stage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks[0], "forward", fail)
        try:
            if first:
                run_batch(case, chunks, 99, range(case.microbatches))
        except ValueError:
            return True
    return not first
