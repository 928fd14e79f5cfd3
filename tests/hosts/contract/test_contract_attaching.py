"""Attaching is done on all ranks or on none; what has failed or was detached leaves nothing, on every host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hosts import STAGES, build, forget, settings_of
from left_behind import alive, differences, names_in, references, state_of

import megatron_patches
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.overrides import Overrides
from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed

LIFE = {"warmup_steps": 1, "monitoring_steps": 2, "progressive_steps": 1, "replan_interval": 1, "replan_threshold": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    "in place": {},
    "deferred": {"weight_gradients": "deferred"},
    "tokens": {"granularity": "token"},
}
each_way = pytest.mark.parametrize("way", WAYS)
NOTHING = "no.such.parameter"


def settings(way: str, folder: str, **more: Any) -> dict[str, Any]:
    return settings_of({**LIFE, **WAYS[way], **more}, folder)


# --- an attach that fails ------------------------------------------------------------------------------------


@each_way
def test_a_failed_attach_leaves_nothing_and_the_next_one_freezes(ranks, host, tmp_path, way):
    for error, left, masked, failure in ranks(STAGES).run(corrected, host, str(tmp_path), way):
        assert error.startswith("ConfigError")
        assert NOTHING in error
        assert left == []
        assert masked > 0.5
        assert failure is None


def corrected(host: str, folder: str, way: str) -> tuple[str, list[str], float, str | None]:
    """The error, what the attach has changed, the share of this rank's first stage that the next one freezes."""
    training = build(host)
    before = state_of(training.objects())
    error = error_of(lambda: training.attach(settings(way, folder, freeze_exclude=[NOTHING])))
    left = differences(before, state_of(training.objects()))
    training.attach(settings(way, folder))
    controller = training.controller
    force_plan(controller, 0.8)
    stage = next(iter(controller.pipeline.parameters))
    controller.begin_step()
    masked = controller.mask(stage, 0).share
    controller._step_start = None
    for number in range(2):
        training.step(number)
    training.detach()
    return error, left, masked, controller.state.failure


FAILURES: dict[str, Callable[[], Any]] = {
    "describing": lambda: mock.patch("tf_adapters.hosts.adapter._check_scaled", broken),
    "making": lambda: mock.patch("tf_adapters.hosts.adapter.Controller", broken),
    "a hook": lambda: failing(torch.optim.Optimizer, "register_step_post_hook", 0),
    "the first override": lambda: failing(Overrides, "set", 0),
    "the second override": lambda: failing(Overrides, "set", 1),
    "the taps": lambda: mock.patch("tf_adapters.weight_gradients.taps.StageTaps.install", broken),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_on_one_rank_is_the_same_on_all_and_leaves_nothing(ranks, host, tmp_path, failure):
    outcomes = ranks(STAGES).run(fail_on_one, host, str(tmp_path), failure)
    assert outcomes == [("RemoteError: rank 1: RuntimeError: broken", [], [])] * STAGES


def fail_on_one(host: str, folder: str, failure: str) -> tuple[str, list[str], list[str]]:
    """The error, what the attach has changed, and what of the run then stays in memory."""
    megatron_patches.revert_all()  # those of an earlier test
    training = build(host)
    before = state_of(training.objects())
    with FAILURES[failure]() if dist.get_rank() == 1 else nullcontext():
        error = error_of(functools.partial(training.attach, settings("deferred", folder)))
    left = differences(before, state_of(training.objects()))
    living = references(training.objects())
    del training, before
    forget(host)
    return error, left, alive(living)


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


@contextmanager
def failing(kind: type, name: str, calls: int) -> Iterator[None]:
    """A method that fails after so many calls."""
    made, run = iter(range(calls)), getattr(kind, name)

    def method(*args: Any) -> Any:
        return run(*args) if next(made, None) is not None else broken()

    with mock.patch.object(kind, name, method):
        yield


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except TimelyFreezeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- detaching -----------------------------------------------------------------------------------------------


@each_way
def test_detaching_leaves_every_object_as_it_was(ranks, host, tmp_path, way):
    assert ranks(STAGES).run(on_and_off, host, str(tmp_path), way) == [[]] * STAGES


def on_and_off(host: str, folder: str, way: str) -> list[str]:
    training = build(host)
    training.attach(settings(way, folder))  # what patches the process stays: they let a host without an adapter be
    training.detach()
    before = state_of(training.objects())
    for _ in range(2):
        training.attach(settings(way, folder))
        training.detach()
    return differences(before, state_of(training.objects()))


@each_way
def test_after_detach_a_run_has_no_more_attributes_and_hooks_than_one_alone(ranks, host, tmp_path, way):
    for alone, ours in ranks(STAGES).run(trained, host, str(tmp_path), way):
        assert {name: (alone[name], of) for name, of in ours.items() if alone.get(name) != of} == {}


def trained(host: str, folder: str, way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for chosen in (None, way):
        training = run_of(host, folder, chosen)
        found.append(names_in(state_of(training.objects())))
        del training
    return found[0], found[1]


def run_of(host: str, folder: str, way: str | None) -> Any:
    """A run of a few steps: with freezing to its last phase, and then without."""
    training = build(host)
    if way is not None:
        training.attach(settings(way, folder))
        for number in range(8):
            training.step(number)
        assert training.controller.state.failure is None
        assert training.controller.phase.value == "stable"
        training.detach()
    for number in range(8, 10):
        training.step(number)
    return training


def test_detaching_twice_does_nothing_more(ranks, host, tmp_path):
    assert ranks(STAGES).run(detached_twice, host, str(tmp_path)) == [[]] * STAGES


def detached_twice(host: str, folder: str) -> list[str]:
    """In a with block, and on one rank only by a further call."""
    training = build(host)
    training.attach(settings("in place", folder))
    with training.adapter:
        training.step(0)
        training.detach()
    before = state_of(training.objects())
    if dist.get_rank() == 1:
        training.detach()
    return differences(before, state_of(training.objects()))


@each_way
def test_nothing_that_was_detached_stays_in_memory(ranks, host, tmp_path, way):
    for alone, ours in ranks(STAGES).run(remaining, host, str(tmp_path), way):
        assert ours == alone


def remaining(host: str, folder: str, way: str) -> tuple[list[str], list[str]]:
    found = []
    for chosen in (None, way):
        training = run_of(host, folder, chosen)
        objects = training.objects()
        if chosen is not None:
            objects |= {"adapter": training.adapter, "controller": training.controller}
        living = references(objects)
        del training, objects
        forget(host)
        found.append(alive(living))
    return found[0], found[1]


def test_a_run_that_has_failed_keeps_no_model_alive(ranks, host, tmp_path):
    """Its last report is written as the process ends."""
    for alone, ours in ranks(STAGES).run(lost, host, str(tmp_path)):
        assert ours == alone


def lost(host: str, folder: str) -> tuple[list[str], list[str]]:
    found = []
    for frozen in (False, True):
        training = build(host)
        if frozen:
            training.attach(settings("tokens", folder))
        training.step(0)
        living = references(training.objects())
        del training
        forget(host)
        found.append(alive(living))
    return found[0], found[1]
