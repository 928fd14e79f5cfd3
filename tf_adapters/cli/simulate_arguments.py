"""The arguments of ``tf-adapters simulate``: added to a parser, and read into ``simulate.options.Options``."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import ValidationError

from tf_adapters.cli.outputs import add_output_arguments
from tf_adapters.errors import ConfigError
from tf_adapters.simulate.model_costs import SHAPES
from tf_adapters.simulate.named_schedules import SCHEDULES, SINGLE, canonical
from tf_adapters.simulate.options import Options

_SWEEP = "0.2,0.4,0.6,0.8,1"
_TIMES, _RATIOS = "a finite time in ms of at least 0", "a number from 0 to 1"
_EXPECTED = {
    **dict.fromkeys(("forward_ms", "backward_ms", "communication_ms"), _TIMES),
    **dict.fromkeys(("weight_share", "max_freeze_ratio", "sweep"), _RATIOS),
    "steps": "meet or overlap",
    "extra_microbatches": "a whole number from -1000000 to 1000000",
    "tflops": "a finite number of TFLOP/s of at least 0.000001",
}
"""Allowed values by argument, for error texts; those of other arguments are whole numbers from 1 to 1000000."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every argument. Values stay text: ``read_options`` refuses wrong ones in one line."""
    times = parser.add_argument_group("how long actions take: give one")
    times.add_argument("report", nargs="?", metavar="REPORT.json", help="what a run measured, also while it goes on")
    times.add_argument("--input", metavar="INPUT.json", help="schedule and times as `tf-adapters plan` takes them")
    times.add_argument("--forward-ms", metavar="MS", help="forward of a stage: one value, or one per stage: 10,12,9,11")
    times.add_argument("--backward-ms", metavar="MS", help="whole backward of a stage, likewise (with --forward-ms)")
    times.add_argument("--weight-share", metavar="W", help="share of the backward that is weight gradients [0.5]")
    times.add_argument("--model", metavar="NAME", help=f"from a model's FLOPs: {', '.join(SHAPES)}")
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
        help="with --defer: microbatches that a rank may hold beyond the schedule's fullest rank; below 0, so many "
        "fewer [0, or as recorded]",
    )
    freezing.add_argument(
        "--steps",
        metavar="HOW",
        help="meet: all ranks meet between two steps; overlap: a rank may begin the next step while others still work "
        "[meet, or as recorded]",
    )
    add_output_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON in the place of tables")


def read_options(args: argparse.Namespace) -> Options:
    """Read ``args``. Raises ConfigError: one line with the argument, its value and the allowed values."""
    _check_one_source(args)
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if value is not None}
    if args.sweep == "none":
        del given["sweep"]
    if args.extra_microbatches is None and args.defer:
        given["extra_microbatches"] = 0
    elif args.extra_microbatches is not None and not args.defer:
        raise ConfigError(f"--extra-microbatches {args.extra_microbatches}: goes with --defer")
    if args.forward_ms is not None and args.backward_ms is None:
        raise ConfigError("--backward-ms: missing: --forward-ms needs it")
    if args.model is not None:
        given["model"] = args.model.lower().replace("_", "-")
        if given["model"] not in SHAPES:
            raise ConfigError(f"--model {args.model!r}: allowed are {', '.join(SHAPES)}")
    try:
        return Options(**{**given, "schedules": _schedules(args)})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        expected = _EXPECTED.get(name, "a whole number from 1 to 1000000")
        raise ConfigError(f"{_argument(name)} {problem['input']!r}: expected {expected}") from None


def _check_one_source(args: argparse.Namespace) -> None:
    named = {"REPORT.json": args.report, "--input": args.input, "--forward-ms": args.forward_ms, "--model": args.model}
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
