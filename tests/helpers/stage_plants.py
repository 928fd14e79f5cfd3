"""Faults that are made on purpose, so that it is seen that the comparisons find them.

Each plant but the first two takes one defence of the weight gradients out of the package. ``FOUND`` has the cases that
must then be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from stage_cases import BEGINS_LATER, MICROBATCHES, Case, case_of_one
from stage_training import Training
from torch.autograd.function import FunctionCtx

from tf_adapters.training.controller import Controller
from tf_adapters.weight_gradients import tap_function, tapped_layer, taps
from tf_adapters.weight_gradients.kept import Kept
from tf_adapters.weight_gradients.tap_check import TapCheck
from tf_adapters.weight_gradients.tapped_layer import LinearTap, TappedLayer

Plant = Callable[[ExitStack], None]


def shifted_masks(stack: ExitStack) -> None:
    own = Training.masks

    def shifted(run: Training) -> dict[int, set[str]]:
        return {m: own(run)[(m + 1) % MICROBATCHES] for m in range(MICROBATCHES)}

    stack.enter_context(patch.object(Training, "masks", shifted))


def raises_on_rank_1(stack: ExitStack) -> None:
    own = Training.step

    def failing(run: Training, number: int) -> Any:
        deferred = run.adapter is not None and run.adapter.config.defers
        if deferred and dist.get_rank() == 1 and number == 1:
            raise ZeroDivisionError("planted")
        return own(run, number)

    stack.enter_context(patch.object(Training, "step", failing))


def kept_as_they_are(stack: ExitStack) -> None:
    """What waits is the tensor itself, which others may change."""

    def keep(kept: Kept, tensor: torch.Tensor) -> None:
        kept._original, kept.tensor = None, tensor.detach()

    stack.enter_context(patch.object(Kept, "__init__", keep))
    stack.enter_context(patch.object(taps, "seal", lambda kept: 0))


def hooks_unseen(stack: ExitStack) -> None:
    stack.enter_context(patch.object(tapped_layer, "has_users_hook", lambda parameters: False))


def proven_by_zeros(stack: ExitStack) -> None:
    stack.enter_context(patch.object(TapCheck, "_is_proven", lambda check, layer: True))


def no_weight_is_wanted(stack: ExitStack) -> None:
    """A gradient that is asked for by name is not computed."""
    stack.enter_context(patch.object(tap_function, "is_wanted", lambda node: False))


def no_taps_in_the_loss(stack: ExitStack) -> None:
    """A checkpoint that runs again in the loss function runs without taps."""
    stack.enter_context(patch.object(Controller, "around_loss", lambda controller, stage, microbatch: nullcontext()))


class WithoutGraph:
    apply = staticmethod(torch.zeros_like)


def no_second_derivatives(stack: ExitStack) -> None:
    stack.enter_context(patch.object(tap_function, "_GraphOnly", WithoutGraph))


def kinds_alike(stack: ExitStack) -> None:
    stack.enter_context(patch.object(LinearTap, "kind", lambda layer, inputs: None))


def writes_unseen(stack: ExitStack) -> None:
    """The check does not look whether memory is written to by a pointer."""
    stack.enter_context(patch.object(TapCheck, "_look_for_changes", lambda check: None))


def other_gradients_unseen(stack: ExitStack) -> None:
    """No step notices that something else has changed a parameter's gradient."""
    stack.enter_context(patch.object(taps, "_is_same", lambda before, now: True))


def zeros_for_none(stack: ExitStack) -> None:
    """A tap gets zeros where autograd has no gradient."""
    stack.enter_context(patch.object(FunctionCtx, "set_materialize_grads", lambda ctx, value: None))


def class_of_ours(stack: ExitStack) -> None:
    """A tapped layer has a class of ours."""
    install, remove = TappedLayer.install, TappedLayer.remove

    def changing(layer: TappedLayer, given: Any) -> None:
        install(layer, given)
        layer.module.__class__ = type("Tapped", (type(layer.module),), {})

    def changing_back(layer: TappedLayer) -> None:
        layer.module.__class__ = type(layer.module).__base__
        remove(layer)

    stack.enter_context(patch.object(TappedLayer, "install", changing))
    stack.enter_context(patch.object(TappedLayer, "remove", changing_back))


PLANTS: dict[str, Plant] = {
    "masks": shifted_masks,
    "raise on rank 1": raises_on_rank_1,
    "kept": kept_as_they_are,
    "hooks": hooks_unseen,
    "proven": proven_by_zeros,
    "wanted": no_weight_is_wanted,
    "loss": no_taps_in_the_loss,
    "graph": no_second_derivatives,
    "kind": kinds_alike,
    "writes": writes_unseen,
    "other gradients": other_gradients_unseen,
    "none": zeros_for_none,
    "class": class_of_ours,
}

FOUND: dict[str, tuple[Case, ...]] = {
    "kept": (
        case_of_one("LearnedPosition"),
        case_of_one("ChangedByFunction", "torch"),
        case_of_one("ChangedByHook", "torch", BEGINS_LATER),
        case_of_one("NormBranch"),
        *(case_of_one(kind, "torch") for kind in ("StaticInput", "StaticGradient", "Workspace", "WorkspaceOfInputs")),
        case_of_one("StaticInput", "numpy"),
    ),
    "writes": tuple(case_of_one(kind, "numpy") for kind in ("Workspace", "WorkspaceOfInputs")),
    "hooks": tuple(case_of_one(kind) for kind in ("JointClip", "WeightHook", "AccumulatedClamp")),
    "proven": (case_of_one("ZeroScale", "rounded"),),
    "wanted": (case_of_one("WeightInLoss", "", BEGINS_LATER), case_of_one("BackwardInLoss", "", BEGINS_LATER)),
    "loss": (case_of_one("ActivationInLoss", "checkpointed"),),
    "graph": (case_of_one("PenaltyInLoss", "", BEGINS_LATER), case_of_one("PenaltyInForward", "", BEGINS_LATER)),
    "kind": (case_of_one("LinearReplaced", "", BEGINS_LATER),),
    "other gradients": (case_of_one("WeightElsewhere", "norm", BEGINS_LATER),),
    "none": (case_of_one("NoGradient"), case_of_one("NoGradient", "", BEGINS_LATER)),
    "class": (case_of_one("TypeLoop"),),
}
"""By plant, cases whose result is wrong with it, or is only said with it, and never wrong without it."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a fault on this rank; none without a name."""
    with ExitStack() as stack:
        if name:
            PLANTS[name](stack)
        yield
