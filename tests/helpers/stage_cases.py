"""Random pipelines of small stages, each a pure function of a number, and smaller ones made from it."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import stage_autograd_parts
import stage_hostile_parts
import torch
from rank_pools import seed
from stage_parts import PARTS, ROWS, VOCABULARY, WIDTH, Part, Tensor
from torch import nn

MICROBATCHES = 4
AGAIN = "Again"  # the part before it, called once more
SHARES = "Shares"  # a linear layer whose weight is that of one before it
AROUND = tuple(name for name, kind in PARTS.items() if kind.takes)
LEAVES = (*(name for name, kind in PARTS.items() if not kind.takes), AGAIN, SHARES)
assert stage_autograd_parts.Around.takes == 1
HOSTILE = tuple(stage_hostile_parts.HOSTILE)
BEGINS_LATER = 2
"""A step in which all layers are tapped."""

HOSTILE_SHARE = 0.2
"""The share of hostile parts among all."""

KNOWN = {
    "GradientOfAWeight": "a forward that calls torch.autograd.grad by a parameter raises where that is masked",
    "OptimizerInBackward": "a plan may run forwards before updates of their weights that the host runs first",
}
"""Parts, alone or inside another, that the package fails with today: to be taken from this list once it does not."""


@dataclass(frozen=True)
class Spec:
    """A part: its kind and way, the number that it is built from, the parts inside it, and when it begins."""

    kind: str
    number: int = 1
    inside: tuple[Spec, ...] = ()
    way: str = ""
    begins: int = 0

    def __str__(self) -> str:
        name = self.kind + (f":{self.way}" if self.way else "") + (f"@{self.begins}" if self.begins else "")
        return f"{name}({', '.join(map(str, self.inside))})" if self.inside else name

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({self.kind}).union(*(spec.kinds for spec in self.inside))


@dataclass(frozen=True)
class Case:
    """A pipeline on two ranks, and how it is trained."""

    number: int
    stages: tuple[tuple[Spec, ...], ...]
    schedule: str = "Schedule1F1B"
    pair: bool = False  # two tensors go from stage to stage
    tokens: bool = True  # the first stage looks its inputs up; else they are its activations
    adaptive: bool = False  # AdamW, else SGD with momentum
    set_to_none: bool = True
    extra_microbatches: int = 0
    gradient_scale: str = "skipped_as_zero"
    ratio: float = 0.5

    def __str__(self) -> str:
        flags = [name for name in ("pair", "tokens", "adaptive", "set_to_none") if getattr(self, name)]
        stages = " | ".join(", ".join(map(str, of_stage)) for of_stage in self.stages)
        rest = f"{self.schedule}, {', '.join(flags)}, +{self.extra_microbatches}, {self.gradient_scale}, {self.ratio}"
        return f"[{stages}] {rest}"

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset[str]().union(*(spec.kinds for of_stage in self.stages for spec in of_stage))

    @property
    def half(self) -> bool:
        return bool(self.kinds & {"Half", "AutocastOutput", "Autocast"})

    @property
    def steps(self) -> int:
        """The first step checks all layers. Hostile parts may begin later, or be proven later."""
        return 4 if self.kinds & {*HOSTILE} else 2

    @property
    def no_oracle(self) -> str:
        """Why masked gradients cannot be compared with those of one process; empty if they can."""
        return next((PARTS[kind].no_oracle for kind in sorted(self.kinds & {*HOSTILE}) if PARTS[kind].no_oracle), "")


def draw_case(number: int, without: Collection[str] = KNOWN) -> Case:
    """The case of a number. ``without`` some kinds of parts it has others in their place."""
    draw = random.Random(number)
    schedule = draw.choice(("Schedule1F1B", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleavedZeroBubble"))
    count = 4 if schedule == "ScheduleInterleavedZeroBubble" else 2
    depth = (1, 3) if count == 4 else (2, 6)
    stages = tuple(tuple(_draw_spec(draw, without) for _ in range(draw.randint(*depth))) for _ in range(count))
    return Case(
        number,
        stages,
        schedule,
        pair=draw.random() < 0.3,
        tokens=draw.random() < 0.7,
        adaptive=draw.random() < 0.5,
        set_to_none=draw.random() < 0.8,
        extra_microbatches=draw.choice((0, 0, 1, 2)),
        gradient_scale=draw.choice(("skipped_as_zero", "skipped_as_zero", "computed_mean")),
        ratio=draw.choice((0.3, 0.5, 0.7, 0.9)),
    )


def cases_of_one() -> list[Case]:
    """A part of each kind, in each of its ways, between plain layers on both stages."""
    kinds = [(kind, PARTS.get(kind, Part)) for kind in (*LEAVES, *AROUND)]
    return [
        case_of_one(kind, way, begins)
        for kind, of in kinds
        for way in of.ways
        for begins in ((0, BEGINS_LATER) if of.later else (0,))
    ]


def case_of_one(kind: str, way: str = "", begins: int = 0, **settings: Any) -> Case:
    inside = tuple(Spec("Linear", 10 + n) for n in range(PARTS[kind].takes if kind in PARTS else 0))
    one = Spec(kind, 3, inside, way, begins)
    return Case(
        0,
        tuple((Spec("Linear", 1 + s), replace(one, number=3 + s), Spec("Norm", 5 + s)) for s in range(2)),
        **settings,
    )


def _draw_spec(draw: random.Random, without: Collection[str], above: tuple[str, ...] = ()) -> Spec:
    """A part, inside those ``above`` it."""

    def allowed(name: str) -> bool:
        known = name in without or any(f"{outer}({name})" in without for outer in above)
        return not known and ("Checkpointed" not in above or _repeats(name))

    around = [name for name in AROUND if len(above) < 2 and allowed(name)]
    hostile = [name for name in HOSTILE if allowed(name)]
    leaves = [name for name in LEAVES if name not in HOSTILE and (not above or name in PARTS) and allowed(name)]
    if hostile and draw.random() < HOSTILE_SHARE:
        kind = draw.choice(hostile)
    else:
        kind = draw.choice(around if around and draw.random() < (0.25 if above else 0.4) else leaves)
    of = PARTS.get(kind, Part)
    inside = tuple(_draw_spec(draw, without, (*above, kind)) for _ in range(of.takes))
    begins = draw.choice((0, 1, BEGINS_LATER)) if of.later else 0
    return Spec(kind, draw.randrange(1, 10**6), inside, draw.choice(of.ways), begins)


def _repeats(kind: str) -> bool:
    return kind not in PARTS or PARTS[kind].repeats


def smaller(case: Case) -> Iterator[Case]:
    """The case with a part less, with what was inside one in its place, or with a plainer setting."""
    for s, stage in enumerate(case.stages):
        for p, spec in enumerate(stage):
            for instead in ((), *((inner,) for inner in spec.inside)):
                changed = (*stage[:p], *instead, *stage[p + 1 :])
                yield replace(case, stages=(*case.stages[:s], changed, *case.stages[s + 1 :]))
    if len(case.stages) == 4:
        a, b, c, d = case.stages
        yield replace(case, stages=(a + b, c + d), schedule="Schedule1F1B")
    plain = Case(case.number, case.stages)
    for s, stage in enumerate(case.stages):
        for p, spec in enumerate(stage):
            if spec.begins:
                changed = (*stage[:p], replace(spec, begins=0), *stage[p + 1 :])
                yield replace(case, stages=(*case.stages[:s], changed, *case.stages[s + 1 :]))
    for name in ("pair", "tokens", "adaptive", "set_to_none", "extra_microbatches", "gradient_scale"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})


class Stage(nn.Module):
    """One stage: its parts in turn, between one or two tensors ``[rows, WIDTH]``."""

    def __init__(self, case: Case, index: int) -> None:
        super().__init__()
        self.first, self.last, self.pair = index == 0, index == len(case.stages) - 1, case.pair
        seed(1000 + index)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if self.first and case.tokens else None
        self.side = nn.Linear(WIDTH, WIDTH) if case.pair and not self.last else None
        self.parts = nn.ModuleList()
        for spec in case.stages[index]:
            self.parts.append(self._make(spec))

    def _make(self, spec: Spec) -> nn.Module:
        if spec.kind == AGAIN and len(self.parts):
            return self.parts[-1]
        kind: Any = PARTS.get(spec.kind, PARTS["Linear"])
        layer = kind(spec.number, tuple(map(self._make, spec.inside)), spec.way, spec.begins)
        if spec.kind == SHARES:
            others = [m for m in self.parts.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
            same = [other for other in others if other.weight.shape == (WIDTH, WIDTH)]
            if same:
                layer.layer.weight = same[0].weight
        return layer  # type: ignore[no-any-return]

    @property
    def own_parts(self) -> list[Part]:
        return [module for module in self.modules() if isinstance(module, Part)]

    def begin(self, step: int) -> None:
        """A step begins, counted from 0."""
        for own in self.own_parts:
            own.step = step

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a microbatch, with what the parts of this stage, the last one, add to it."""
        loss: Tensor = nn.functional.smooth_l1_loss(outputs.float(), targets)
        for own in self.own_parts:
            loss = own.term(loss, outputs)
        return loss

    def end(self) -> None:
        """The optimizer has updated the weights."""
        for own in self.own_parts:
            own.end()

    def forward(self, *inputs: Tensor) -> Any:
        x, side = inputs if len(inputs) == 2 else (inputs[0], inputs[0])
        seed(_key(x))  # what is dropped out is a function of the microbatch, whatever the order
        if self.embedding is not None:
            x = side = self.embedding(x)
        for inner in self.parts:
            x = inner(x)
        if self.last:
            return x + torch.sin(side) if self.pair else x
        return (x, self.side(side) + 0.5 * x) if self.side is not None else x


def _key(x: Tensor) -> int:
    """The same for values that differ by rounding errors."""
    return round(100.0 * float(x.detach().double().sum())) % 2**31


class Whole(nn.Module):
    """All stages in one process: what the oracle computes with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(case, index) for index in range(len(case.stages)))

    def forward(self, x: Any) -> Tensor:
        for stage in self.stages:
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        return x  # type: ignore[no-any-return]

    def begin(self, step: int) -> None:
        for stage in self.stages:
            stage.begin(step)  # type: ignore[operator]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.stages[-1].loss(outputs, targets)  # type: ignore[operator,no-any-return]


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(7919 * case.number + step)
    rows = ROWS * MICROBATCHES
    targets = torch.randn(rows, WIDTH, generator=generator)
    if case.tokens:
        return torch.randint(VOCABULARY, (rows,), generator=generator), targets
    return torch.randn(rows, WIDTH, generator=generator), targets


def microbatches(case: Case, step: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(tensor.chunk(MICROBATCHES) for tensor in batch(case, step)), strict=True))


def example(case: Case, index: int) -> tuple[Tensor, ...]:
    """What a stage takes: tensors of their own."""
    if index == 0:
        return (batch(case, 77)[0][:ROWS],)
    generator = torch.Generator().manual_seed(index)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator).requires_grad_() for _ in range(2 if case.pair else 1))


def seen_by_hooks(model: nn.Module) -> dict[str, Tensor]:
    """What the user's hooks have seen since the last call, by the part's name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Part):
            values = [t.grad if t.requires_grad else t for t in module.seen]
            for n, value in enumerate(values):
                found[f"{name}.seen{n}"] = torch.full((), torch.nan) if value is None else value.clone()
            module.seen.clear()
    return found
