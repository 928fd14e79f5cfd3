"""The arguments of ``tf-adapters simulate`` and what their values mean, checked before any work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tf_adapters.errors import ConfigError
from tf_adapters.report.outputs import add_output_arguments
from tf_adapters.simulate.orders import SCHEDULES, SINGLE, Sizes, canonical

__all__ = ["ModelOptions", "Options", "StageOptions", "add_arguments", "read_options"]

MODELS = ("llama-1b", "llama-8b", "llama-13b")
_SWEEP = "0.2,0.4,0.6,0.8,1"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Times of stages as given, in ms: one value or one for each stage; the weight share is in [0, 1]."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_share: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model's name in ``MODELS``, a microbatch's sequences and their length in tokens, a device's TFLOP/s."""

    name: str
    sequences: int
    length: int
    tflops: float


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, read. Of ``report``, ``input``, ``stages`` and ``model`` exactly one is there."""

    report: str | None
    input: str | None
    stages: StageOptions | None
    model: ModelOptions | None
    schedules: tuple[str, ...]
    csv: str | None
    sizes: Sizes
    communication_ms: float | None
    max_freeze_ratio: float | None
    sweep: tuple[float, ...]
    extra_microbatches: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every argument. Values stay text: ``read_options`` refuses wrong ones in one line."""
    times = parser.add_argument_group("how long actions take: give one")
    times.add_argument("report", nargs="?", metavar="REPORT.json", help="what a run measured, also while it goes on")
    times.add_argument("--input", metavar="INPUT.json", help="schedule and times as `tf-adapters plan` takes them")
    times.add_argument("--forward-ms", metavar="MS", help="forward of a stage: one value, or one per stage: 10,12,9,11")
    times.add_argument("--backward-ms", metavar="MS", help="whole backward of a stage, likewise (with --forward-ms)")
    times.add_argument("--weight-share", metavar="W", help="share of the backward that is weight gradients [0.5]")
    times.add_argument("--model", metavar="NAME", help=f"from a model's FLOPs: {', '.join(MODELS)}")
    times.add_argument("--sequences", metavar="N", help="with --model: sequences in a microbatch [2]")
    times.add_argument("--length", metavar="TOKENS", help="with --model: tokens in a sequence [1024]")
    times.add_argument("--tflops", metavar="RATE", help="with --model: what a device computes, in TFLOP/s [989]")
    order = parser.add_argument_group("in which order actions run")
    order.add_argument("--schedule", metavar="NAMES", help=f"one or several, or all: {', '.join(SCHEDULES)}")
    order.add_argument("--csv", metavar="FILE", help="an order in the CSV format of torch.distributed.pipelining")
    order.add_argument("--microbatches", metavar="M", help="microbatches in a batch")
    order.add_argument("--stages", metavar="S", help="stages of the whole pipeline; given times are per stage")
    order.add_argument("--ranks", metavar="R", help="pipeline ranks; without --stages, given times are per rank")
    order.add_argument("--stages-per-rank", metavar="V", help="for schedules with several [2]")
    order.add_argument("--communication-ms", metavar="MS", help="of every hand-over between ranks [0, or as recorded]")
    freezing = parser.add_argument_group("how much is frozen")
    freezing.add_argument("--max-freeze-ratio", "--r-max", metavar="R", help="r_max, from 0 to 1 [0.8, or as recorded]")
    freezing.add_argument(
        "--sweep", metavar="RATIOS", default=_SWEEP, help=f"other r_max to compare, or none [{_SWEEP}]"
    )
    freezing.add_argument(
        "--defer",
        action="store_true",
        help="weight gradients wait until a rank would idle, and only what still does not fit is frozen",
    )
    freezing.add_argument(
        "--extra-microbatches",
        metavar="N",
        help="with --defer: microbatches that a rank may hold beyond the schedule's fullest rank [0, or as recorded]",
    )
    add_output_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON in the place of tables")


def read_options(args: argparse.Namespace) -> Options:
    """The values of ``args``. Raises ConfigError: one line with the argument, the value and what is allowed."""
    _check_one_source(args)
    return Options(
        report=args.report,
        input=args.input,
        stages=_stage_options(args),
        model=_model_options(args),
        schedules=_schedules(args),
        csv=args.csv,
        sizes=Sizes(
            microbatches=_read(args, "microbatches", _count),
            ranks=_read(args, "ranks", _count),
            stages=_read(args, "stages", _count),
            stages_per_rank=_read(args, "stages_per_rank", _count),
        ),
        communication_ms=_read(args, "communication_ms", _milliseconds),
        max_freeze_ratio=_read(args, "max_freeze_ratio", _ratio),
        sweep=() if args.sweep == "none" else _list("--sweep", args.sweep, _ratio),
        extra_microbatches=_extra_microbatches(args),
    )


def _extra_microbatches(args: argparse.Namespace) -> int | None:
    """None where weight gradients stay in place, as far as the arguments say."""
    text = args.extra_microbatches
    if text is None:
        return 0 if args.defer else None
    if not args.defer:
        raise ConfigError(f"--extra-microbatches {text}: goes with --defer")
    return 0 if text == "0" else _count("--extra-microbatches", text)


def _check_one_source(args: argparse.Namespace) -> None:
    named = {
        "REPORT.json": args.report,
        "--input": args.input,
        "--forward-ms": args.forward_ms,
        "--model": args.model,
    }
    given = [name for name, value in named.items() if value is not None]
    if not given:
        raise ConfigError("no times: give a run's REPORT.json, --input, --model, or --forward-ms with --backward-ms")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them, each says how long actions take")
    needs = {"--forward-ms": ("backward_ms", "weight_share"), "--model": ("sequences", "length", "tflops")}
    for owner, names in needs.items():
        for name in names:
            if getattr(args, name) is not None and owner not in given:
                raise ConfigError(f"{_argument(name)} {getattr(args, name)}: goes with {owner}, not with {given[0]}")


def _stage_options(args: argparse.Namespace) -> StageOptions | None:
    if args.forward_ms is None:
        return None
    if args.backward_ms is None:
        raise ConfigError("--backward-ms: missing: --forward-ms needs it")
    return StageOptions(
        forward_ms=_list("--forward-ms", args.forward_ms, _milliseconds),
        backward_ms=_list("--backward-ms", args.backward_ms, _milliseconds),
        weight_share=_list("--weight-share", "0.5" if args.weight_share is None else args.weight_share, _ratio),
    )


def _model_options(args: argparse.Namespace) -> ModelOptions | None:
    if args.model is None:
        return None
    name = args.model.lower().replace("_", "-")
    if name not in MODELS:
        raise ConfigError(f"--model {args.model!r}: allowed are {', '.join(MODELS)}")
    return ModelOptions(
        name=name,
        sequences=_read(args, "sequences", _count) or 2,
        length=_read(args, "length", _count) or 1024,
        tflops=_read(args, "tflops", _rate) or 989.0,
    )


def _schedules(args: argparse.Namespace) -> tuple[str, ...]:
    if args.schedule is None:
        return ()
    if args.schedule.strip().lower() == "all":
        return tuple(SCHEDULES)
    names = tuple(dict.fromkeys(canonical(name) for name in args.schedule.split(",")))
    if args.stages_per_rank not in (None, "1") and set(names) <= set(SINGLE):
        raise ConfigError(f"--stages-per-rank {args.stages_per_rank}: {', '.join(names)}: one stage on each rank")
    return names


def _argument(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(args: argparse.Namespace, name: str, convert: Callable[[str, str], _T]) -> _T | None:
    text = getattr(args, name)
    return None if text is None else convert(_argument(name), text)


def _list(argument: str, text: str, convert: Callable[[str, str], float]) -> tuple[float, ...]:
    return tuple(convert(argument, part.strip()) for part in text.split(","))


def _count(argument: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= 1_000_000):
        raise ConfigError(f"{argument} {text!r}: expected a whole number from 1 to 1000000")
    return int(text)


def _milliseconds(argument: str, text: str) -> float:
    return _number(argument, text, low=0.0, high=math.inf, allowed="a finite time in ms of at least 0")


def _ratio(argument: str, text: str) -> float:
    return _number(argument, text, low=0.0, high=1.0, allowed="a number from 0 to 1")


def _rate(argument: str, text: str) -> float:
    return _number(argument, text, low=1e-6, high=math.inf, allowed="a finite number of TFLOP/s of at least 0.000001")


def _number(argument: str, text: str, low: float, high: float, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{argument} {text!r}: expected {allowed}")
    return value
