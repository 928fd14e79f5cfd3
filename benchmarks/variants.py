"""Variants of the algorithm against each other and the host alone, on every host: `python benchmarks/variants.py`.

paper: the paper's monitoring, half of whose steps freeze everything; partial masks on the first stage.
mixed: monitoring that trains, as many steps. ours: the defaults, which are monitoring that trains and ends once it is
precise, and backwards of the first stage that are frozen whole.

Two pipeline ranks on this machine's CPU, one thread each, 1F1B (--gpipe: GPipe, not in Megatron). All variants train in
the same processes from the same weights on the same batches, step by step in turn. Prints a table, and writes
results/variants.json beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import aligned, machine

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Step, in_rotation

ALONE = "alone"
HOSTS = ("deepspeed", "megatron-core", "torch")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"monitoring": "halves"},
    "mixed": {"monitoring_precision": 1e-9},
    "ours": {},
}
MEASURED = 40
"""Rounds at the end, in which all variants freeze stably."""


@dataclass(frozen=True)
class Study:
    """What to train; steps."""

    host: str
    gpipe: bool = False
    warmup: int = 10
    monitoring: int = 60
    progressive: int = 10
    variants: Sequence[str] = tuple(VARIANTS)

    @property
    def steps(self) -> int:
        return self.warmup + self.monitoring + self.progressive + MEASURED


@dataclass(frozen=True)
class Row:
    """One variant on one host. Ratios are of step times to the host alone; freeze ratios are in [0, 1].

    Attributes:
        monitored: steps of monitoring.
        idle: of these, steps in which no parameter was updated.
        planned, measured: step ratios.
        freeze_ratio: mean of the plan.
        freeze_ratio_for_paper: the least that this variant's options need for the step of the paper's plan, both from
            the same times (bounds: the means of all variants; the paper's gaps), so that no noise is in the comparison.
        off_bounds: mean difference of the bounds of a stage to the first variant's, share of the unfrozen time; the
            largest of all stages.
        loss, loss_alone: held out, after equal steps.
    """

    host: str
    variant: str
    monitored: int
    idle: int
    planned: float
    measured: float
    freeze_ratio: float
    freeze_ratio_for_paper: float
    off_bounds: float
    loss: float
    loss_alone: float

    def cells(self) -> list[str]:
        return [
            self.host,
            self.variant,
            str(self.monitored),
            str(self.idle),
            f"{1 / self.planned:.2f}x",
            f"{1 / self.measured:.2f}x",
            f"{self.measured / self.planned - 1:+.1%}",
            f"{self.freeze_ratio:.2f}",
            f"{self.freeze_ratio_for_paper:.2f}",
            f"{self.off_bounds:.1%}",
            f"{self.loss:.3f}",
            f"{self.loss_alone:.3f}",
        ]


HEADINGS = [
    "host", "variant", "monitored", "idle", "planned", "measured", "step off plan", "freeze ratio",
    "for paper's step", "bounds off", "loss", "loss alone",
]  # fmt: skip


def main() -> None:
    args = parse_args()
    print(*HEADINGS, sep="  ", flush=True)
    for host in args.hosts:
        study = Study(host, args.gpipe, monitoring=args.monitoring, variants=args.variants)
        with RankPool(2, functools.partial(setup, host)) as ranks:
            found: list[Row] = ranks.run(measure, study, timeout_s=3600)[0]
        for row in found:
            print(aligned(row.cells(), HEADINGS))
        keep(study, found)


def keep(study: Study, rows: Sequence[Row]) -> None:
    """Write a host's rows into the results, in the place of its old ones; rows of another study go."""
    path = Path(__file__).with_name("results") / ("variants_gpipe.json" if study.gpipe else "variants.json")
    settings = {**asdict(study), "variants": {name: VARIANTS[name] for name in study.variants}}
    del settings["host"]
    record = {"machine": machine("torch"), "study": settings}
    old = json.loads(path.read_text()) if path.exists() else {}
    same = old.get("study") == settings and old.get("machine") == record["machine"]
    others = [row for row in old["rows"] if row["host"] != study.host] if same else []
    record["rows"] = sorted([*others, *map(asdict, rows)], key=lambda row: HOSTS.index(row["host"]))
    path.write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS)
    parser.add_argument("--gpipe", action="store_true", help="GPipe instead of 1F1B")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--monitoring", type=int, default=60, help="steps, at most")
    args = parser.parse_args()
    if args.gpipe and "megatron-core" in (args.hosts or ()):
        parser.error("--hosts: megatron-core has no GPipe")
    args.hosts = args.hosts or [host for host in HOSTS if not (args.gpipe and host == "megatron-core")]
    return args


# --- on the ranks --------------------------------------------------------------------------------------------


@dataclass
class Training:
    """One training on this rank: the host alone where there is no adapter."""

    step: Step
    held_out: Callable[[], float]
    adapter: Any = None


def setup(host: str) -> None:
    """Runs first in every rank."""
    module(host).setup()


def module(host: str) -> Any:
    """The benchmark that builds trainings of a host."""
    import importlib
    import os
    import sys

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "benchmarks"), str(root / "examples" / "deepspeed_gpt")] if host == "deepspeed" else []
    return importlib.import_module({"deepspeed": "paired", "megatron-core": "megatron_speed"}.get(host, "schedules"))


def start(study: Study, name: str, settings: Mapping[str, Any] | None) -> Training:
    """A training of this name with some settings over the study's own; None: the host alone."""
    host, freezing = module(study.host), settings is not None
    lengths = {"warmup": study.warmup, "monitoring": study.monitoring, "progressive": study.progressive}
    output_dir = f"runs/bench/variants/{study.host}_{name}"
    given = {**lengths, "settings": {**(settings or {}), "output_dir": output_dir}}
    if study.host == "deepspeed":
        options = host.Options(config="gpipe" if study.gpipe else "plain", **given)
        trainer, adapter = host.build_engine(options, freezing)
    elif study.host == "megatron-core":
        options = host.Options(config="1f1b", **given)
        trainer, adapter = host.build(options, freezing)
    else:
        options = host.Options("gpipe" if study.gpipe else "1f1b", **given)
        trainer = host.build(options)
        adapter = attach_torch(trainer, options) if freezing else None
    return Training(host.training_step(trainer, options), lambda: host.held_out_loss(trainer, options), adapter)


def attach_torch(trainer: Any, options: Any) -> Any:
    from tf_adapters.torch_pipelining import attach

    return attach(trainer.schedule, options.section(), optimizer=trainer.optimizers)


def measure(study: Study) -> list[Row]:
    """Train the host alone and every variant in turn. Called on all ranks at once."""
    trainings = {name: start(study, name, VARIANTS.get(name)) for name in (ALONE, *study.variants)}
    steps = {name: training.step for name, training in trainings.items()}
    idle = dict.fromkeys(study.variants, 0)
    ratios: dict[str, list[float]] = {name: [] for name in study.variants}
    for number in range(study.steps):
        for name in study.variants:
            idle[name] += trainings[name].adapter.controller.phase.value == "monitoring_lower"
        times = in_rotation(steps, number)
        if number >= study.steps - MEASURED:
            for name in study.variants:
                ratios[name].append(times[name] / times[ALONE])
    controllers = {name: trainings[name].adapter.controller for name in study.variants}
    losses = {name: training.held_out() for name, training in trainings.items()}
    bounds = mean_bounds([of_one.state.bounds for of_one in controllers.values()])
    gaps = controllers[study.variants[0]].state.gaps
    papers_ms = solved(controllers[study.variants[0]], bounds, gaps).makespan_ms.planned
    rows = [
        Row(
            host=study.host,
            variant=name,
            monitored=of_one.state.phases.monitoring_steps,
            idle=idle[name],
            planned=of_one.forecast.ratio,
            measured=statistics.median(ratios[name]),
            freeze_ratio=of_one.state.plan.mean_freeze_ratio,
            freeze_ratio_for_paper=solved(of_one, bounds, gaps, papers_ms).mean_freeze_ratio,
            off_bounds=difference(of_one.state.bounds, controllers[study.variants[0]].state.bounds),
            loss=losses[name],
            loss_alone=losses[ALONE],
        )
        for name, of_one in controllers.items()
    ]
    for name in study.variants:
        trainings[name].adapter.detach()
    return rows


def mean_bounds(measured: Sequence[Mapping[Any, Any]]) -> dict[Any, tuple[float, float]]:
    """Of each action, the means of both bounds."""
    return {
        action: tuple(
            statistics.fmean(getattr(of_one[action], end) for of_one in measured) for end in ("lower", "upper")
        )
        for action in measured[0]
    }


def solved(controller: Any, bounds: Mapping[Any, tuple[float, float]], gaps: Any, target_ms: float = 0.0) -> Any:
    """The plan of a variant's options for these times, with the least freezing that reaches the target makespan."""
    from tf_adapters.planner.solve import plan

    return plan(
        controller.schedule,
        bounds,
        controller.config.max_freeze_ratio,
        communication=gaps.communication,
        overhead=gaps.overhead,
        target_makespan_ms=target_ms,
    )


def difference(bounds: Mapping[Any, Any], reference: Mapping[Any, Any]) -> float:
    """The worst stage's mean difference of a bound to the reference, as a share of the unfrozen time."""
    found = []
    for stage in {action.stage for action in bounds}:
        actions = [action for action in bounds if action.stage == stage and action.freezable]
        whole = sum(reference[action].upper for action in actions)
        for bound in ("lower", "upper"):
            off = sum(getattr(bounds[action], bound) - getattr(reference[action], bound) for action in actions)
            found.append(abs(off) / whole)
    return max(found)


if __name__ == "__main__":
    main()
