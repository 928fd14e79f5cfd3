"""A random pipeline on its ranks: the host alone, then every way of freezing, each held against what it must compute."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rank_pools import destroy_groups
from stage_cases import MICROBATCHES, Case, Stage, Whole, batch, example, loss_fn, microbatches, seen_by_hooks
from stage_parts import ROWS, WIDTH
from stage_traces import traces
from torch import nn

import tf_adapters.torch_pipelining
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.testing import force_plan, masked_gradients, relative_error
from tf_adapters.testing.oracle import recorded_draws

STEPS = 3
SECTION: dict[str, Any] = {
    **{"warmup_steps": 0, "monitoring_steps": 20, "progressive_steps": 0, "on_error": "raise", "plan_wait": True},
    "report_every": 1000,
}
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

Named = dict[str, torch.Tensor | None]


@dataclass
class Outcome:
    """What became of a case on one rank."""

    skipped: str = ""
    refused: dict[str, str] = field(default_factory=dict)  # by mode
    wrong: dict[str, list[str]] = field(default_factory=dict)  # by mode


class Training:
    """One rank's part of a run."""

    def __init__(self, case: Case) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining import schedules as host

        self.case, count, rank = case, len(case.stages), dist.get_rank()
        self.models = {index: Stage(case, index) for index in ((rank,) if count == 2 else (rank, rank + 2))}
        for index, model in self.models.items():
            model.index = index  # type: ignore[assignment]
        outputs = {i: tuple(torch.empty(ROWS, WIDTH, requires_grad=True) for _ in range(case.pair + 1)) for i in range(count)}
        outputs[count - 1] = outputs[count - 1][:1]
        inputs = {i: outputs[i - 1] if i else example(case, 0) for i in range(count)}
        stages = [
            PipelineStage(model, i, count, torch.device("cpu"), inputs[i], outputs[i], group=pipeline_group())
            for i, model in self.models.items()
        ]
        kind = getattr(host, case.schedule)
        self.schedule = kind(stages[0] if count == 2 else stages, MICROBATCHES, loss_fn=loss_fn)
        trained = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        trained = list(dict.fromkeys(trained)) or [nn.Parameter(torch.zeros(1))]
        if case.adaptive:
            self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=1e-2, momentum=0.9, weight_decay=0.1)
        self.adapter: Any = None
        self._gradients: Named = {}
        self._recorder: Any = None

    def attach(self, section: dict[str, Any], folder: str) -> None:
        settings = {**SECTION, **section, "output_dir": folder}
        self.adapter = tf_adapters.torch_pipelining.attach(self.schedule, settings, optimizer=self.optimizer)

    def gradients(self) -> Named:
        return {f"stages.{i}.{n}": p.grad for i, m in self.models.items() for n, p in m.named_parameters()}

    def record(self) -> None:
        """Keep what the optimizer gets, as the last of its hooks."""
        if self._recorder is not None:
            self._recorder.remove()

        def keep(*_: Any) -> None:
            self._gradients = {n: None if g is None else g.detach().clone() for n, g in self.gradients().items()}

        self._recorder = self.optimizer.register_step_pre_hook(keep)

    def step(self, number: int) -> dict[str, Named]:
        """One update, and all that it has left."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        inputs, targets = batch(self.case, number)
        losses: list[torch.Tensor] = []
        first, last = 0 in self.models, len(self.case.stages) - 1 in self.models
        self.schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        self.optimizer.step()
        return {
            "loss": {str(n): loss.detach() for n, loss in enumerate(losses)},
            "gradient": dict(self._gradients),
            "value": {n: t.detach().clone() for n, t in self.state().items()},
            "hook": {f"stages.{i}.{n}": t for i, m in self.models.items() for n, t in seen_by_hooks(m).items()},
        }

    def state(self) -> dict[str, torch.Tensor]:
        return {f"stages.{i}.{n}": t for i, m in self.models.items() for n, t in m.state_dict().items()}

    def masks(self) -> dict[int, set[str]]:
        """The names that each microbatch of the next step freezes, on all stages."""
        controller = self.adapter.controller
        return {
            m: {
                f"stages.{s}.{name}"
                for s in range(len(self.case.stages))
                for name in controller.frozen_parameters(controller.step, s, m)
            }
            for m in range(MICROBATCHES)
        }


def run_case(case: Case, modes: tuple[str, ...], folder: str, plant: str = "") -> Outcome:
    """Called on both ranks. An error in a mode is raised with its name before it. Reports go to ``folder``."""
    warnings.simplefilter("ignore")
    outcome = Outcome()
    reason = untrainable(case)
    if reason:
        return Outcome(skipped=reason)
    reference, copies = host_alone(case)
    for mode in modes:
        wrong: list[str] = []
        try:
            with Planted(plant):
                wrong = run_mode(case, mode, reference, copies, folder)
        except (ConfigError, UnsupportedError) as refused:  # on both ranks
            outcome.refused[mode] = str(refused)
        except Exception as error:
            wrong = [f"raised {root_of(error)}"]
        if wrong[:1] and wrong[0].startswith("raised"):
            forget_groups()  # which ends what the other rank waits for
        if any(gathered({dist.get_rank(): mode in outcome.refused or wrong[:1]}).values()):
            forget_groups()
        if wrong:
            outcome.wrong[mode] = wrong
    return outcome


def host_alone(case: Case) -> tuple[list[dict[str, Named]], dict[int, list[Any]]]:
    """What each step leaves, and by stage the ways of copying it that work."""
    alone = Training(case)
    alone.record()
    copies = {i: [make for make in (duplicated, saved) if not isinstance(copied_by(make, m), str)] for i, m in alone.models.items()}
    return [alone.step(number) for number in range(STEPS + 1)], copies


GROUPS: list[Any] = []


def pipeline_group() -> Any:
    """A group of both ranks for what goes from stage to stage: not the world's, so that it can be given up."""
    if not GROUPS:
        GROUPS.append(dist.new_group())
    return GROUPS[0]


def forget_groups() -> None:
    GROUPS.clear()
    destroy_groups()


def root_of(error: BaseException) -> str:
    """The first line of what an error came from: torch wraps what a stage raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def untrainable(case: Case) -> str:
    """Why one process alone cannot train the whole model; the same on every rank."""
    try:
        whole = Whole(case)
        for inputs, targets in microbatches(case, 0):
            loss = loss_fn(whole(inputs), targets)
            loss.backward()
            if not bool(loss.isfinite()):
                return "the loss is not finite"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def run_mode(case: Case, mode: str, reference: Any, copies: Any, folder: str) -> list[str]:
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
    run.adapter.detach()
    after = [traces(model) for model in run.models.values()], traces_of_host(run)
    wrong += [f"after detach(): {text}" for text in changes(before, after)]
    if mode.startswith("nothing"):
        wrong += [f"after detach(): {text}" for text in differences(run.step(STEPS), reference[STEPS])]
    return wrong


Check = Callable[[Case, Training, Any, Any], list[str]]

# --- what each mode must compute -----------------------------------------------------------------------------------


def against_host(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """With nothing frozen, the host's own bits."""
    wrong: list[str] = []
    for number in range(STEPS):
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
    """With whole tensors frozen, the mean over microbatches of what the masks leave. Judged on rank 0."""
    wrong: list[str] = []
    tolerance = 1e-2 if case.half else 1e-5
    for number in range(2):
        states, masks = gathered({n: t.detach().clone() for n, t in run.state().items()}), run.masks()
        actual = gathered(run.step(number)["gradient"])
        if dist.get_rank():
            continue
        whole = Whole(case)
        whole.load_state_dict(states)
        of_case = microbatches(case, number)
        expected = masked_gradients(whole, of_case, loss_fn, masks.__getitem__, case.gradient_scale)
        largest = max(float(g.abs().double().norm()) for g in expected.values())
        for name, of_oracle in expected.items():
            mine = actual[name] if actual[name] is not None else torch.zeros_like(of_oracle)
            error = error_of(mine, of_oracle)
            if not error * float(of_oracle.abs().double().norm()) <= 1e-7 * largest and not error <= tolerance:
                wrong.append(f"step {number}: gradient {name}: {apart(mine, of_oracle)}")
    return wrong


def error_of(mine: torch.Tensor, of_oracle: torch.Tensor) -> float:
    if of_oracle.is_complex():
        return relative_error(torch.view_as_real(mine.resolve_conj()), torch.view_as_real(of_oracle.resolve_conj()))
    return relative_error(mine, of_oracle)


def gathered(mine: Any) -> dict[str, Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {name: value for of_rank in everywhere for name, value in of_rank.items()}


def against_host_where_no_token_is_drawn(case: Case, run: Training, reference: Any, copies: Any) -> list[str]:
    """With tokens sampled, the host's own gradients of all weights that no draw was made for, and none that is lost."""
    with recorded_draws() as draws:
        steps = [run.step(number) for number in range(2)]
    drawn = {f"stages.{stage}.{name}" for (_, stage, _), of_stage in draws.items() for name in of_stage}
    masks = run.adapter.controller.masks
    able = {f"stages.{stage}.{name}" for stage in range(len(case.stages)) for name in masks.caps(stage)}
    wrong = [f"{name} is never sampled, but was" for name in sorted(drawn - able)]
    mine, theirs = ({n: g for n, g in s["gradient"].items() if n not in drawn} for s in (steps[0], reference[0]))
    wrong += differences({"gradient": mine}, {"gradient": theirs})
    for number, step in enumerate(steps):
        for name, gradient in step["gradient"].items():
            lost = (gradient is None) != (reference[number]["gradient"][name] is None)
            if lost or (gradient is not None and not bool(gradient.isfinite().all())):
                wrong.append(f"step {number}: gradient {name} is lost or not finite")
    return wrong


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
    wrong = differences(run.step(0), reference[0])
    for index, make, other in copied:
        wrong += [f"a copy ({make.__name__}): {text}" for text in of_copy(case, index, other, make)]
    return wrong


def of_copy(case: Case, index: int, other: nn.Module | str, make: Callable[[nn.Module], nn.Module]) -> list[str]:
    """Whether a copy that was made while attached computes with its own values, as a copy of a fresh stage does."""
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
    """What a stage computes by itself."""
    outputs = model(*example(case, index))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [output.sum() for output in outputs if output.requires_grad]
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


def traces_of_host(run: Training) -> Any:
    """Names of what the host's objects hold of their own, and the optimizer's hooks."""
    stages = [vars(stage) for stage in stage_list(run.schedule)]
    return {
        "functions of stages": [sorted(n for n, v in held.items() if callable(v)) for held in stages],
        "functions of the schedule": sorted(n for n, v in vars(run.schedule).items() if callable(v)),
        "timely_freeze": hasattr(run.schedule, "timely_freeze"),
    }


def stage_list(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def changes(before: Any, after: Any) -> list[str]:
    """Where two traces differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after}, key=str)
        return [f"{key}: {text}" for key in keys for text in changes(before.get(key, "-"), after.get(key, "-"))]
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)) and len(before) == len(after):
        return [text for pair in zip(before, after, strict=True) for text in changes(*pair)]
    return [] if before == after else [f"was {before!s:.100}, is {after!s:.100}"]


class Planted:
    """A fault that is made on purpose, so that it is seen that the comparison finds it."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        self._masks = Training.masks
        if self._fault == "masks":
            own = self._masks
            Training.masks = lambda run: {m: own(run)[(m + 1) % MICROBATCHES] for m in range(MICROBATCHES)}  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Training.masks = self._masks  # type: ignore[method-assign]


def prepare() -> None:
    """Runs first in every rank."""
    logging.disable(logging.CRITICAL)  # torch prints the whole schedule for every error


def teardown() -> None:
    forget_groups()
