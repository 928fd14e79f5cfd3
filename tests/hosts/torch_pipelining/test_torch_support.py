"""What torch's schedules are refused for, what attaching does and leaves alone, and what a stage can freeze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from logged import Lines
from torch import nn
from torch_ranks import Case, Layers, Run, build, device_mesh, pool

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError

distributed = pytest.mark.distributed
PREFIX = "timely_freeze cannot run here: "
ALONE = Case(ranks=1)  # a pipeline of one stage: two of them are replicas
ZBV_ALONE = replace(ALONE, schedule="ScheduleZBVZeroBubble")


# --- schedules and stages that are refused -------------------------------------------------------------------


def no_schedule(run: Run) -> None:
    run.schedule = object()


def no_loss(run: Run) -> None:
    run.schedule = type(run.schedule)(run.stages[0], run.case.microbatches)


def custom_function(run: Run) -> None:
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    run.schedule.register_custom_function(OVERLAP_F_B, lambda action, context: None)


def weight_gradient_builder(run: Run) -> None:
    run.stages[0].dw_builder = lambda: lambda: None


def compiled_part(run: Run) -> None:
    next(run.stages[0].submod.layers.children()).compile()


def compiled_on_the_last_rank(run: Run) -> None:
    if run.stages[0].is_last:
        compiled_part(run)


def flat_parameters(run: Run) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    run.stages[0].submod = FullyShardedDataParallel(run.stages[0].submod, device_id=torch.device("cpu"))


def reducer_inside(run: Run) -> None:
    from torch.nn.parallel import DistributedDataParallel

    layers = run.stages[0].submod.layers
    layers["1"] = DistributedDataParallel(layers["1"])


def old_replicate(run: Run) -> None:
    from torch.distributed._composable.replicate import replicate

    replicate(run.stages[0].submod)


def sharded_part(run: Run) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(run.stages[0].submod.layers["1"], mesh=device_mesh(2, 1)["dp"])


def odd_optimizer(run: Run) -> None:
    run.optimizers = [object()]  # type: ignore[list-item]


def foreign_optimizer(run: Run) -> None:
    run.optimizers = [torch.optim.SGD(nn.Linear(2, 2).parameters())]


def no_optimizer(run: Run) -> None:
    run.optimizers = []


def no_optimizer_on_the_last_rank(run: Run) -> None:
    if run.stages[0].is_last:
        run.optimizers = []


def unchanged(run: Run) -> None: ...


COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)
DDP = "stage 0 is wrapped in DistributedDataParallel "
REFUSED: dict[str, tuple[Case, Callable[[Run], None], str]] = {
    "no schedule": (Case(), no_schedule, "the schedule is a object; it needs one of torch.distributed.pipelining"),
    "no loss": (Case(), no_loss, "the schedule has no loss_fn, so it runs forwards only"),
    "custom function": (
        Case("ScheduleDualPipeV"),
        custom_function,
        "a custom function is registered for OVERLAP_F_B; masks need the stages' own computations",
    ),
    "dw_builder": (
        ALONE,
        weight_gradient_builder,
        "stage 0 has a dw_builder, which computes weight gradients outside of autograd",
    ),
    "compiled": (Case(), compiled_part, COMPILED),
    "FSDP of old": (
        ALONE,
        flat_parameters,
        "stage 0 is wrapped in FullyShardedDataParallel, whose flat parameters cannot be masked; use fully_shard",
    ),
    "DDP inside": (ALONE, reducer_inside, "stage 0 holds DistributedDataParallel inside; wrap the whole stage instead"),
    "FSDP on a part": (
        ALONE,
        sharded_part,
        "stage 0 has fully_shard on a part only; apply it to the whole stage too",
    ),
    "FSDP that reshards, split": (
        replace(ZBV_ALONE, replicas="fsdp nested"),
        unchanged,
        "stage 0 has fully_shard with reshard_after_forward, with which torch computes wrong gradients in split "
        "backwards (I and W), with or without freezing; apply it with reshard_after_forward=False",
    ),
    "nothing trains on stage 0, split": (
        replace(ZBV_ALONE, adapted=range(5, 9)),
        unchanged,
        "stage 0 trains nothing, and in split backwards (I and W) torch then computes no gradients for the next stage, "
        "with or without freezing; use a schedule of whole backwards, such as 1F1B",
    ),
    "DDP, split": (
        replace(ZBV_ALONE, replicas="ddp"),
        unchanged,
        f"{DDP}and split backwards (I and W): torch then reduces no gradients, with or without freezing; "
        "use fully_shard",
    ),
    "replicate of before": (
        ALONE,
        old_replicate,
        "stage 0 has replicate on DistributedDataParallel's reducer; use the one of _composable.replicate_with_fsdp",
    ),
    "DDP, static graph": (
        replace(ALONE, replicas="ddp static"),
        unchanged,
        f"{DDP}with static_graph=True, but every mask is another graph; leave it off",
    ),
    "DDP, unused parameters": (
        replace(ALONE, replicas="ddp unused"),
        unchanged,
        f"{DDP}with find_unused_parameters=True, which counts frozen parameters a second time; leave it off",
    ),
    "DDP without optimizer": (
        replace(ALONE, replicas="ddp"),
        no_optimizer,
        f"{DDP}which leaves zero gradients for the optimizer: pass it, attach(..., optimizer=optimizer)",
    ),
    "no optimizer of torch's": (
        ALONE,
        odd_optimizer,
        "optimizer is a object: allowed is a torch.optim.Optimizer, or several in a list",
    ),
    "foreign optimizer": (ALONE, foreign_optimizer, "the optimizer holds no parameter of this rank's stages"),
}


def attach(run: Run, config: Any = None) -> Any:
    import tf_adapters.torch_pipelining

    return tf_adapters.torch_pipelining.attach(run.schedule, config, optimizer=run.optimizers or None)


def outcome(case: Case, change: Callable[[Run], None], *configs: Any) -> tuple[str, str]:
    run = build(case)
    change(run)
    before = dict(vars(run.schedule)) if hasattr(run.schedule, "__dict__") else {}
    config = configs[torch.distributed.get_rank()] if configs else {"max_freeze_ratio": 0.8}
    try:
        adapter = attach(run, config)
    except Exception as error:
        untouched = not before or vars(run.schedule).keys() == before.keys()
        return type(error).__name__ if untouched else "changed the schedule", str(error)
    return ("attached" if adapter else "disabled"), ""


@distributed
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line_on_all_ranks(name: str) -> None:
    case, change, text = REFUSED[name]
    assert pool(2).run(outcome, case, change) == [("UnsupportedError", PREFIX + text)] * 2


def reducer_of_python(run: Run) -> None:
    run.stages[0].submod._use_python_reducer = True


def delayed_reduction(run: Run) -> None:
    run.stages[0].submod._delay_all_reduce_params = [*run.stages[0].submod.parameters()]


@distributed
@pytest.mark.parametrize(
    ("variant", "change", "text"),
    [
        ("ddp mixed", unchanged, "with mixed_precision, whose own hooks change gradients in the backward"),
        ("ddp", reducer_of_python, "with torch's Python reducer, which reduces each gradient by itself"),
        ("ddp", delayed_reduction, "with delay_all_reduce_named_params, which reduces some gradients later"),
    ],
)
def test_a_reducer_that_cannot_wait_is_left_its_weight_gradients(variant: str, change: Any, text: str) -> None:
    case = replace(ALONE, replicas=variant)
    deferred = {"weight_gradients": "deferred", "max_freeze_ratio": 0.8}
    line = f'{PREFIX}{DDP}{text}; use weight_gradients "in_place" with it'
    assert pool(2).run(outcome, case, change, deferred, deferred) == [("UnsupportedError", line)] * 2


def own_loop(run: Run) -> None:
    class Own(type(run.schedule)):  # type: ignore[misc]
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
            return super()._step_microbatches(*args, **kwargs)

    run.schedule.__class__ = Own


@distributed
def test_a_loop_of_another_project_is_not_replaced_by_a_rewritten_order() -> None:
    deferred = {"weight_gradients": "deferred", "max_freeze_ratio": 0.8}
    refused = (
        "the schedule runs its batches in a loop of test_torch_support, which a rewritten order would bypass; "
        'use weight_gradients "in_place"'
    )
    assert pool(2).run(outcome, Case(), own_loop, deferred, deferred) == [("UnsupportedError", PREFIX + refused)] * 2
    assert pool(2).run(outcome, Case(), own_loop) == [("attached", "")] * 2


@distributed
def test_what_is_wrong_on_one_rank_only_is_raised_on_all() -> None:
    refusal = ("UnsupportedError", f"rank 1: {PREFIX}{COMPILED}")
    assert pool(2).run(outcome, Case(), compiled_on_the_last_rank) == [refusal] * 2


@distributed
def test_an_optimizer_on_some_ranks_only_is_an_error_on_all() -> None:
    text = "the optimizers differ between ranks: rank 0 has some, rank 1 has none; every rank needs the same"
    assert pool(2).run(outcome, Case(), no_optimizer_on_the_last_rank) == [("ConfigError", text)] * 2


@distributed
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("replicas", ["", "ddp", "fsdp", "fsdp nested"])
def test_what_is_right_is_accepted(replicas: str, optimizer: str) -> None:
    case = replace(ALONE, replicas=replicas, optimizer=optimizer)
    assert pool(2).run(outcome, case, unchanged) == [("attached", "")] * 2


# --- settings ------------------------------------------------------------------------------------------------

WRONG = "timely_freeze.max_freeze_ratio is 1.5: allowed is a number from 0 to 1"
SCHEDULE = (
    'timely_freeze.schedule is "gpipe": allowed is "host"; with torch.distributed.pipelining the schedule is the '
    "object that you pass"
)


@distributed
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, None, ("attached", "")),
        ({}, TimelyFreezeConfig(), ("attached", "")),
        ({"enabled": False}, {"enabled": False}, ("disabled", "")),
        ({"schedule": "gpipe"}, {"schedule": "gpipe"}, ("ConfigError", SCHEDULE)),
        ({"max_freeze_ratio": 1.5}, {"max_freeze_ratio": 1.5}, ("ConfigError", WRONG)),
        ({}, {"max_freeze_ratio": 1.5}, ("ConfigError", f"rank 1: {WRONG}")),
        (
            {"seed": 1},
            {"seed": 2},
            (
                "ConfigError",
                "the timely_freeze settings differ between ranks: rank 0 has {'goal': 'exact', 'seed': 1}, rank 1 "
                "has {'goal': 'exact', 'seed': 2}; every rank needs the same",
            ),
        ),
    ],
    ids=["none", "defaults", "disabled", "schedule", "wrong", "wrong on one rank", "different"],
)
def test_settings(first: Any, second: Any, expected: tuple[str, str]) -> None:
    assert pool(2).run(outcome, Case(), unchanged, first, second) == [expected] * 2


@distributed
def test_what_would_be_refused_may_train_with_freezing_disabled() -> None:
    off = {"enabled": False}
    assert pool(2).run(outcome, Case(), compiled_part, off, off) == [("disabled", "")] * 2


# --- attaching -----------------------------------------------------------------------------------------------


@distributed
def test_attaching_twice_gives_the_first_adapter_and_refuses_other_settings() -> None:
    (same_adapter, lines), (also_same, others) = pool(2).run(attached_twice)
    assert same_adapter
    assert also_same
    [line] = lines
    assert line.startswith("timely_freeze: enabled: goal exact (")
    assert f"; torch.distributed.pipelining {torch.__version__}, 2 stages x " in line
    assert others == []


def attached_twice() -> tuple[bool, list[str]]:
    run = build(Case())
    with Lines() as lines:
        adapter = attach(run)
        again = attach(run)
        with pytest.raises(ConfigError, match="attached already, with other settings"):
            attach(run, {"max_freeze_ratio": 0.1})
    same = adapter is again is run.schedule.timely_freeze
    return same and adapter.controller.config.goal == "exact", lines.seen


@distributed
def test_a_wrong_length_of_the_warm_up_is_one_line_on_all_ranks() -> None:
    line = "warmup_steps is 'ten': allowed is an integer of at least 0"
    assert [said.removeprefix("rank 0: ") for said in pool(2).run(with_warmup, "ten")] == [line] * 2
    assert pool(2).run(with_warmup, 3) == [3, 3]


def with_warmup(steps: Any) -> Any:
    import tf_adapters.torch_pipelining

    run = build(Case())
    try:
        adapter = tf_adapters.torch_pipelining.attach(run.schedule, optimizer=run.optimizers, warmup_steps=steps)
    except ConfigError as error:
        return str(error)
    return adapter.controller.state.phases.warmup_end


@distributed
def test_detaching_leaves_everything_as_it_was_and_lets_it_be_attached_again() -> None:
    assert pool(2).run(attached_again) == [(True, True)] * 2


def attached_again() -> tuple[bool, bool]:
    run = build(Case("ScheduleZBVZeroBubble"))
    owners = (run.schedule, *run.stages)
    before = [dict(vars(owner)) for owner in owners]
    adapter = attach(run)
    adapter.detach()
    restored = all(vars(owner) == then for owner, then in zip(owners, before, strict=True))
    return restored, attach(run) is not adapter


# --- what a stage can freeze ---------------------------------------------------------------------------------


def test_an_embedding_table_counts_one_row() -> None:
    from tf_adapters.hosts.units import units_of

    units = {unit.names[0]: unit for unit in units_of(Layers(0, 1))}
    assert units["layers.0.weight"].work == 12
    assert units["layers.0.weight"].shape == (32, 12)
    assert units["layers.1.up.weight"].work == 24 * 12
    assert all(len(unit.names) == 1 for unit in units.values())


def test_a_table_that_also_projects_counts_whole_and_what_the_user_froze_not_at_all() -> None:
    from tf_adapters.hosts.units import units_of

    module = Layers()
    module.layers["9"].weight = module.layers["0"].weight
    module.layers["3"].requires_grad_(False)
    units = {unit.names[0]: unit for unit in units_of(module)}
    assert units["layers.0.weight"].work == 32 * 12
    assert not any(name.startswith("layers.3.") for name in units)


def test_parameters_that_a_ranks_stages_share_are_tied() -> None:
    from tf_adapters.torch_pipelining.units import shared_parameters

    first, last = nn.Embedding(4, 3), nn.Linear(3, 4)
    last.weight = first.weight
    parameters = {0: dict(first.named_parameters()), 3: dict(last.named_parameters())}
    assert shared_parameters(parameters) == (((0, "weight"), (3, "weight")),)
