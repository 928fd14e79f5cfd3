"""Attach freezing to a Megatron model: all ranks decide together whether, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_micro_batch_size, get_num_microbatches
from megatron.core.utils import get_model_config

from megatron_patches import backward_step, communication, forward_backward, forward_step
from megatron_patches.forward_backward import Batch
from megatron_patches.patch import revert_all
from tf_adapters.collectives import Collectives, ProcessGroupCollectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.hosts.adapter import attach_once
from tf_adapters.hosts.agreement import GivenConfig, refuse_other_schedules, same_on_all_ranks
from tf_adapters.megatron.adapter import HOST, MegatronAdapter, MegatronModel, adapter_of
from tf_adapters.megatron.late_norm import norm_can_be_late
from tf_adapters.megatron.optimizers import meets
from tf_adapters.megatron.ordered import check_v
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.placed import PlacedBatch, needs_placing
from tf_adapters.megatron.placement import is_in_v
from tf_adapters.megatron.support import check, keeps_order, missing_options
from tf_adapters.megatron.tags import tagged
from tf_adapters.report.observer import MetricSink

__all__ = ["attach", "patch_schedules"]

_running: MegatronAdapter | None = None  # whose batch runs
_placed: PlacedBatch | None = None  # the batch in a V that runs without an adapter


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: GivenConfig = None,
    *,
    num_microbatches: int | None = None,
    pp_group: Any = None,
    warmup_steps: int | None = None,
    metrics: MetricSink | None = None,
    collectives: Collectives | None = None,
) -> MegatronAdapter | None:
    """Attach freezing to this model. Call it on all ranks, before the first training batch.

    Args:
        model: the model chunks of this rank, as passed to Megatron's forward-backward function.
        optimizer: the result of ``get_megatron_optimizer``, or a torch optimizer.
        config: the settings; by default all defaults.
        num_microbatches: the number in a training batch; by default from Megatron's num_microbatches_calculator.
        pp_group: the pipeline's process group; by default that of ``parallel_state``.
        warmup_steps: the value of ``warmup_steps: "auto"``: the length of the learning-rate warm-up; by default 10.
        metrics: called on this rank after each step with named figures (ratios in [0, 1], ms).
        collectives: those of all ranks that train together; by default over a new gloo group.

    Returns:
        The adapter, with ``controller`` and ``detach()``; None if ``enabled`` is false. A second call returns the same
        adapter, and is refused with other settings.

    Raises:
        ConfigError: a setting is wrong, on all ranks.
        UnsupportedError: freezing cannot be right with this model, on all ranks.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    patched, existing = ExitStack(), adapter_of(chunks)

    def patch() -> None:
        patched.callback(patch_schedules())

    def make(ours: Collectives, settings: TimelyFreezeConfig) -> MegatronAdapter:
        agreed = _agreed_model(ours, chunks, optimizer, num_microbatches=num_microbatches, pp_group=pp_group)
        adapter = MegatronAdapter(agreed, settings, ours, metrics=metrics, warmup_steps=warmup_steps)
        on_all_ranks(ours, patch)
        return adapter

    with patched:
        adapter = attach_once(
            connect=lambda: collectives or ProcessGroupCollectives(),
            host=HOST,
            existing=existing,
            given=config,
            check=lambda settings: _check(chunks, optimizer, settings),
            make=make,
        )
        patched.pop_all()  # they stay after detach: a loop may hold a wrapped function
    if adapter is not None and existing is None:
        _warn_of_missing_options(adapter, get_model_config(chunks[0]))
    return adapter


def _warn_of_missing_options(adapter: MegatronAdapter, config: Any) -> None:
    """Warn if a newer Megatron has renamed options with which freezing would be wrong. Called on all ranks."""
    missing = missing_options(config)
    if missing:
        adapter.controller.warn(
            "this version of Megatron-Core does not have the options that tf-adapters checks for features it cannot "
            f"freeze with: {', '.join(missing)}; if it has them under other names, leave these features off"
        )


def _agreed_model(
    ours: Collectives, chunks: Sequence[Any], optimizer: Any, *, num_microbatches: int | None, pp_group: Any
) -> MegatronModel:
    """Return this rank's model after all ranks have described theirs. Called on all ranks."""
    described: list[MegatronModel] = []
    microbatches = same_on_all_ranks(
        ours, "numbers of microbatches", lambda: num_microbatches or _microbatches_of_the_run()
    )

    def describe() -> tuple[bool, bool, bool]:
        group = pp_group or parallel_state.get_pipeline_model_parallel_group()
        config = get_model_config(chunks[0])
        of_rank = MegatronModel(
            chunks=chunks,
            optimizer=optimizer,
            config=config,
            num_microbatches=microbatches,
            pp_group=group,
            expert_parallel_size=max(1, int(parallel_state.get_expert_model_parallel_world_size())),
            microbatch_size=_microbatch_size_of_the_run(),
        )
        described.append(of_rank)
        return keeps_order(config, group.size(), chunks), norm_can_be_late(optimizer), meets(optimizer)

    keeps, can_be_late, meet = zip(*on_all_ranks(ours, describe), strict=True)
    return replace(
        described[0],
        moves_forwards=not any(keeps),
        norm_can_be_late=all(can_be_late),
        updates_together=all(meet),
    )


@patching()
def patch_schedules() -> Callable[[], None]:
    """Patch the schedules, so that adapters see every batch, forward and backward. Other models run as before.

    Returns a function that reverts the patches of this call. Raises UnsupportedError, and patches nothing, if Megatron
    lacks a symbol.
    """
    modules = (forward_backward, forward_step, backward_step, communication)
    patches = [patch for module in modules for patch in module.PATCHES]
    new = [patch for patch in patches if not patch.applied]
    for patch in patches:
        patch.check()
    forward_backward.apply(_on_batch)
    forward_step.apply(_on_forward)
    backward_step.apply(_on_backward)
    communication.apply(_on_communication)
    return patching()(lambda: revert_all(new))


def _on_batch(run: Any, batch: Batch) -> Any:
    adapter = adapter_of(batch.model)
    global _running, _placed
    outer = _running, _placed  # a loss may run another model's batch
    try:
        if adapter is not None and not batch.forward_only:
            _running = adapter
            with adapter.batch(batch):
                return run()
        if needs_placing(batch):
            _placed = PlacedBatch(batch)
            with _placed.running():
                return run()
        return run()
    finally:
        _running, _placed = outer


def _on_communication(run: Any, *received: Any) -> Any:
    """Compute waiting weight gradients after a receive has begun, while the rank would wait for it."""
    requests = run()
    if _running is not None and any(tensor is not None for tensor in received):
        _running.compute_waiting()
    return requests


def _on_forward(run: Any, model: Any, microbatch: int | None) -> Any:
    if microbatch is not None and _placed is not None and _placed.has(model):
        return _placed.forward(run, model, microbatch)
    adapter = adapter_of(model)
    return run() if adapter is None else adapter.forward(run, model, microbatch)


def _on_backward(run: Any, output: Any) -> Any:
    ours = tagged(output)
    if ours is None:
        return run()
    adapter, chunk, microbatch = ours
    return adapter.backward(run, chunk, microbatch)


def _check(chunks: Sequence[Any], optimizer: Any, settings: TimelyFreezeConfig) -> None:
    refuse_other_schedules(settings, "with Megatron-Core the schedule follows from the pipeline's sizes")
    check(chunks, optimizer, settings)
    config = get_model_config(chunks[0])
    if is_in_v(config):
        check_v(config)
    elif settings.placement == "v":
        raise ConfigError(
            'timely_freeze.placement is "v", but the model was not built in a V: call '
            "tf_adapters.megatron.place_in_v() before initialize_model_parallel"
        )


def _microbatch_size_of_the_run() -> int | None:
    """Return the samples of a microbatch from Megatron's calculator; None if it is not initialized."""
    try:
        return int(get_micro_batch_size())
    except AttributeError:
        return None


def _microbatches_of_the_run() -> int:
    try:
        return int(get_num_microbatches())
    except AttributeError:
        raise ConfigError(
            "num_microbatches is None, and Megatron's num_microbatches_calculator is not initialized: "
            "pass the number of microbatches of a batch, an integer of at least 1"
        ) from None
