"""Each way of freezing must compute the host's own bits on a random pipeline, or the oracle's gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from stage_cases import Case, Stage, Whole, example, microbatches
from stage_training import Named, Training, gathered
from torch import nn

from tf_adapters.testing import masked_gradients, relative_error
from tf_adapters.testing.oracle import recorded_draws

Check = Callable[[Case, Training, Any, Any], list[str]]

SECOND_DERIVATIVES = {"GradientPenalty"}
"""Parts with second derivatives: rounding alone made 1.5e-5 there (seed 595)."""


# --- what each mode must compute -----------------------------------------------------------------------------------


def against_host(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """With nothing frozen, the host's own bits."""
    wrong: list[str] = []
    for number in range(case.steps):
        wrong += [f"step {number}: {text}" for text in differences(run.step(number), reference[number])]
    return wrong


def differences(mine: dict[str, Named], theirs: dict[str, Named]) -> list[str]:
    found = []
    for what, expected in theirs.items():
        found += [f"{what} {name} on one side only" for name in sorted(mine[what].keys() ^ expected.keys())]
        for name in expected.keys() & mine[what].keys():
            if not same(mine[what][name], expected[name]):
                found.append(f"{what} {name}: {apart(mine[what][name], expected[name])}")
    return found


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def apart(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        told = lambda t: "None" if t is None else f"{t.dtype}{list(t.shape)}"  # noqa: E731
        return f"{told(one)} instead of {told(other)}"
    size = torch.complex128 if one.is_complex() else torch.float64
    return f"off by {float((one.to(size) - other.to(size)).norm()):.1e} of {float(other.to(size).norm()):.1e}"


def against_oracle(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """With whole tensors frozen, the mean over microbatches of what the masks leave."""
    wrong: list[str] = []
    for number in range(case.steps):
        of_step = step_against_oracle(case, run, number, run.masks(), case.gradient_scale)
        wrong += [f"step {number}: {text}" for text in of_step]
    return wrong


def step_against_oracle(
    case: Case, run: Training, number: int, masks: dict[int, set[str]], gradient_scale: str
) -> list[str]:
    """Make a step, and return on every rank where its gradients are not the oracle's."""
    states = gathered({n: t.detach().clone() for n, t in run.state().items()})
    actual = gathered(run.step(number)["gradient"])
    tolerance, nothing = (1e-2, 1e-4) if case.half else (1e-5, 1e-6)
    if case.kinds & SECOND_DERIVATIVES and not case.half:
        tolerance = 5e-5
    wrong = []
    if dist.get_rank() == 0:
        whole = Whole(case)
        whole.load_state_dict(states)
        whole.begin(number)
        expected = masked_gradients(whole, microbatches(case, number), whole.loss, masks.__getitem__, gradient_scale)
        largest = max(float(g.abs().double().norm()) for g in expected.values())
        for name, of_oracle in expected.items():
            mine = actual[name] if actual[name] is not None else torch.zeros_like(of_oracle)
            error = error_of(mine, of_oracle)
            if not error * float(of_oracle.abs().double().norm()) <= nothing * largest and not error <= tolerance:
                wrong.append(f"gradient {name}: {apart(mine, of_oracle)}")
    of_all: list[str] = gathered({"wrong": wrong} if dist.get_rank() == 0 else {})["wrong"]
    return of_all


def error_of(mine: torch.Tensor, of_oracle: torch.Tensor) -> float:
    if of_oracle.is_complex():
        return relative_error(torch.view_as_real(mine.resolve_conj()), torch.view_as_real(of_oracle.resolve_conj()))
    return relative_error(mine, of_oracle)


def against_host_where_no_token_is_drawn(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """With tokens sampled, the host's own gradients of all weights that no draw was made for, and none that is lost."""
    able: set[str] = set()  # in any step: a later one may leave a layer to the host
    with recorded_draws() as draws:
        steps = []
        for number in range(case.steps):
            steps.append(run.step(number))
            able |= able_to_be_sampled(case, run)
    drawn = {f"stages.{stage}.{name}" for (_, stage, _), of_stage in draws.items() for name in of_stage}
    wrong = [f"{name} is never sampled, but was" for name in sorted(drawn - able)]
    mine, theirs = ({n: g for n, g in s["gradient"].items() if n not in drawn} for s in (steps[0], reference[0]))
    wrong += [f"step 0: {text}" for text in differences({"gradient": mine}, {"gradient": theirs})]
    for number, step in enumerate(steps):
        for name, gradient in step["gradient"].items():
            lost = (gradient is None) != (reference[number]["gradient"][name] is None)
            if lost or (gradient is not None and not bool(gradient.isfinite().all())):
                wrong.append(f"step {number}: gradient {name} is lost or not finite")
    return wrong


def able_to_be_sampled(case: Case, run: Training) -> set[str]:
    masks = run.adapter.controller.masks
    return {f"stages.{stage}.{name}" for stage in range(len(case.stages)) for name in masks.caps(stage)}


# --- copies, and what detaching leaves -----------------------------------------------------------------------------


def duplicated(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def copied_by(make: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module | str:
    """A copy, or why it cannot be made."""
    try:
        return make(model)
    except Exception as error:
        return f"raised {root_of(error)}"


def of_copies(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """Copies that are made while attached compute with their own values, whatever the run does then."""
    copied = [(i, make, copied_by(make, run.models[i])) for i, makes in copies.items() for make in makes]
    wrong = [f"step 0: {text}" for text in differences(run.step(0), reference[0])]
    for index, make, other in copied:
        wrong += [f"a copy ({make.__name__}): {text}" for text in of_copy(case, index, other, make)]
    return wrong


def of_copy(case: Case, index: int, other: nn.Module | str, make: Callable[[nn.Module], nn.Module]) -> list[str]:
    """Differences between a copy that was made while attached and a copy of a fresh stage with the same values."""
    if isinstance(other, str):
        return [other]
    fresh = make(Stage(case, index))
    fresh.load_state_dict(other.state_dict())
    expected = computed(case, index, fresh)
    try:
        return differences(computed(case, index, other), expected)
    except Exception as error:
        return [f"raised {root_of(error)}"]


def computed(case: Case, index: int, model: nn.Module) -> dict[str, Named]:
    """Outputs and gradients of a stage alone."""
    outputs = model(*example(case, index))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [output.square().sum() for output in outputs if output.requires_grad]
    if trained:
        torch.autograd.backward(trained)
    return {
        "output": {str(n): output.detach() for n, output in enumerate(outputs)},
        "gradient": {n: p.grad for n, p in model.named_parameters()},
    }


CHECKS: dict[str, Check] = {
    "nothing": against_host,
    "masks": against_oracle,
    "tokens": against_host_where_no_token_is_drawn,
    "copies": of_copies,
}


def root_of(error: BaseException) -> str:
    """The first line of what an error came from: torch wraps what a stage raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
