"""A random pipeline on its ranks: the host alone, then every way of freezing, each compared with what is right."""

from __future__ import annotations

import gc
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from stage_cases import MICROBATCHES, Case, Whole, microbatches
from stage_checks import CHECKS, copied_by, differences, duplicated, root_of, saved, step_against_oracle
from stage_hostile_parts import ACCUMULATED, WRITTEN
from stage_plants import planted
from stage_traces import changes, traces, traces_of_host
from stage_training import Named, Training, forget_groups, gathered

from tf_adapters.testing import force_plan

DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
TOKENS: dict[str, Any] = {"granularity": "token"}
NOTHING: dict[str, Any] = {"max_freeze_ratio": 0.0}
MODES: dict[str, tuple[dict[str, Any], float | None]] = {
    "nothing, in place": (NOTHING, 0.0),
    "nothing, deferred": ({**NOTHING, **DEFERRED}, 0.0),
    "nothing, monitored deferred": ({**NOTHING, **DEFERRED}, None),
    "nothing, monitored tokens": ({**NOTHING, **TOKENS}, None),
    "nothing, deferred tokens": ({**NOTHING, **TOKENS, **DEFERRED}, 0.0),
    "masks, in place": ({}, 1.0),
    "masks, deferred": (DEFERRED, 1.0),
    "tokens, in place": (TOKENS, 1.0),
    "tokens, deferred": ({**TOKENS, **DEFERRED}, 1.0),
    "copies": ({**NOTHING, **DEFERRED}, 0.0),
}
"""By name the settings, and the plan that is forced as a share of the case's ratio; None: monitored instead."""

KNOWN_MODES: tuple[str, ...] = ()
"""Modes that the package fails with today, whatever the parts."""

REFUSED = ("raised ConfigError", "raised UnsupportedError", "raised TimelyFreezeError")
OF_THE_OTHER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""Errors that gloo raises on a rank because the other one has failed."""


@dataclass
class Outcome:
    """The result of a case on one rank."""

    skipped: str = ""
    refused: dict[str, str] = field(default_factory=dict)  # by mode
    said: dict[str, str] = field(default_factory=dict)  # by mode: a difference that a note of the run names
    wrong: dict[str, list[str]] = field(default_factory=dict)  # by mode


def run_case(case: Case, modes: tuple[str, ...], folder: str, plant: str = "") -> Outcome:
    """Return where each mode is wrong. Called on both ranks, with a ``folder`` for reports."""
    kept, disabled = list(dist.distributed_c10d._world.pg_map), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs the whole schedule with every error
    try:
        with warnings.catch_warnings(), planted(plant):
            warnings.simplefilter("ignore")
            reason = untrainable(case)
            return Outcome(skipped=reason) if reason else run_modes(case, modes, folder, kept)
    finally:
        logging.disable(disabled)
        forget_groups(kept)


def run_modes(case: Case, modes: tuple[str, ...], folder: str, kept: list[Any]) -> Outcome:
    """Run mode after mode. An error on one rank ends the groups that the other waits in; both go on to the next."""
    outcome = Outcome()
    alone, raised = on_both(lambda: host_alone(case), kept)
    if raised:
        return Outcome(skipped=f"the host alone {raised}")
    if host_differs(case):
        return Outcome(skipped="the host alone computes other gradients than one process does")
    for mode in modes:
        if mode.startswith("masks") and case.no_oracle:
            continue
        found, raised = on_both(lambda mode=mode: run_mode(case, mode, *alone, folder), kept)
        if raised.startswith(REFUSED):
            outcome.refused[mode] = raised
            continue
        if raised:
            outcome.wrong[mode] = [raised]
            continue
        wrong, said = without_said(*found, consequences=mode.startswith("nothing"))
        if wrong:
            outcome.wrong[mode] = wrong
        elif said:
            outcome.said[mode] = said
    return outcome


def on_both(run: Callable[[], Any], kept: list[Any]) -> tuple[Any, str]:
    """Return what ``run`` returns, and the error that it raised on this rank or else on the other."""
    value, raised = None, ""
    try:
        value = run()
    except Exception as error:
        raised = f"raised {root_of(error)}"
    if raised:  # out of the handler: what was raised holds the groups, and the model with our taps
        forget_groups(kept)
        gc.collect()
    of_both = gathered({dist.get_rank(): raised})
    if any(of_both.values()):
        forget_groups(kept)
    own = [text for text in of_both.values() if text and not any(sign in text for sign in OF_THE_OTHER)]
    return value, (own or [*filter(None, of_both.values()), ""])[0]


def host_alone(case: Case) -> tuple[list[dict[str, Named]], dict[int, list[Any]]]:
    """Return all that each step leaves, and by stage the ways of copying it that work."""
    alone = Training(case)
    alone.record()
    copies = {
        stage: [make for make in (duplicated, saved) if not isinstance(copied_by(make, model), str)]
        for stage, model in alone.models.items()
    }
    return [alone.step(number) for number in range(case.steps + 1)], copies


def host_differs(case: Case) -> bool:
    """Torch's split backwards may: a hook on an activation runs in both halves of them.

    So may gradients that are changed in place: where one process has one tensor, two stages have two. And torch's own
    weight gradients read memory that has been written to since.
    """
    splits = "ZeroBubble" in case.schedule
    if splits and case.kinds & {*ACCUMULATED}:
        return True
    if case.no_oracle:
        return splits and bool(case.kinds & {*WRITTEN, "ActivationHook"})
    alone = Training(case)
    alone.record()
    nothing: dict[int, set[str]] = {m: set() for m in range(MICROBATCHES)}
    steps = range(case.steps if case.steps > 2 else 1)
    return any(step_against_oracle(case, alone, number, nothing, case.gradient_scale) for number in steps)


def untrainable(case: Case) -> str:
    """Why one process alone cannot train the whole model; the same on every rank."""
    try:
        whole = Whole(case)
        for step in (0, case.steps - 1):
            whole.begin(step)
            for inputs, targets in microbatches(case, 0):
                loss = whole.loss(whole(inputs), targets)
                loss.backward()
                if not bool(loss.isfinite()):
                    return "the loss is not finite"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def run_mode(case: Case, mode: str, reference: Any, copies: Any, folder: str) -> tuple[list[str], set[int]]:
    """Return what is wrong, and the steps that this rank's notes name."""
    section, share = MODES[mode]
    if share == 1.0 and "granularity" not in section:
        section = {**section, "gradient_scale": case.gradient_scale}
    if section.get("weight_gradients") == "deferred":
        section = {**section, "extra_microbatches": case.extra_microbatches}
    run = Training(case)
    before = [traces(model) for model in run.models.values()], traces_of_host(run)
    run.attach(section, folder)
    run.record()
    if share is not None:
        force_plan(run.adapter.controller, share * case.ratio)
    wrong = CHECKS[mode.partition(",")[0]](case, run, reference, copies)
    run.adapter.finish_step()
    named = steps_named(run)
    run.adapter.detach()
    after = [traces(model) for model in run.models.values()], traces_of_host(run)
    wrong += [f"after detach(): {text}" for text in changes(before, after)]
    if mode.startswith("nothing"):
        last = differences(run.step(case.steps), reference[case.steps])
        wrong += [f"step {case.steps}: after detach(): {text}" for text in last]
    return wrong, named


def steps_named(run: Training) -> set[int]:
    """Return the steps that the notes in the report name. The run's own numbers are other ones."""
    controller = run.adapter.controller
    notes = [*controller.state.notes, *controller.view().local_measurements().notes]
    return {n for n, own in run.own_steps.items() if any(re.search(rf"\bstep {own}\b", note) for note in notes)}


def without_said(wrong: list[str], named: set[int], consequences: bool) -> tuple[list[str], str]:
    """Return this rank's differences without those in steps that a rank's notes have ``named``, and one of those.

    A run that goes on from other values than the host's has ``consequences``: only its first difference counts. Called
    on both ranks.
    """
    named = set[int]().union(*gathered({str(dist.get_rank()): named}).values())
    steps = {text: int(found[1]) for text in wrong if (found := re.match(r"step (\d+): ", text))}
    if consequences:
        of_ranks = gathered({str(dist.get_rank()): sorted(set(steps.values()))})
        first = min((n for of_rank in of_ranks.values() for n in of_rank), default=None)
        named = set(steps.values()) if first in named else set()
    said = [text for text, number in steps.items() if number in named]
    return [text for text in wrong if text not in said], (said or [""])[0]
