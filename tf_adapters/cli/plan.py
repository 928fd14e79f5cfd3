"""``tf-adapters plan``: times and a schedule in, freeze ratios out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn, get_args

from tf_adapters.cli.outputs import write_text
from tf_adapters.cli.progress import ProgressLine
from tf_adapters.errors import PlanInputError
from tf_adapters.measuring.measurement import Steps
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan_from_json

_DESCRIPTION = """\
Read a pipeline schedule with each action's time, all frozen and nothing frozen, in ms;
print how much of each backward's weight-gradient work to skip so that the batch ends earliest.
INPUT.json: {"ranks": [["0F0", "0B0"], ["1F0", "1B0"]], "times": {"0F0": [12, 12], "0B0": [11, 24.5], ...},
             "communication": {"0F0->1F0": 0.4}, "max_freeze_ratio": 0.8}; "-" reads standard input.
--defer lets weight gradients wait (exact: the same gradients): PLAN has the rewritten order, "ranks", in which a B is
an I (its lower bound) and a W (what freezing saves), and "makespan_ms"."host", the order of INPUT with nothing frozen.
--steps overlap is for ranks that do not meet between two steps: PLAN minimises "period_ms", the time from a rank's
first action to its first action in the next step; "between_steps": {"0": 3.5} in INPUT has a rank's own time between.
Exit status: 0 with a plan, 2 for wrong input, 1 when the solver fails."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="plan freeze ratios from measured times",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="INPUT.json", help="schedule and times; - for standard input")
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan here and print one line instead")
    parser.add_argument("--defer", action="store_true", help="let weight gradients wait, and freeze what is left")
    parser.add_argument(
        "--extra-microbatches",
        metavar="N",
        type=_integer,
        default=0,
        help="with --defer: microbatches more than the fullest rank of INPUT that a rank may hold; below 0, so many "
        "fewer (default: 0)",
    )
    parser.add_argument(
        "--steps",
        choices=get_args(Steps),
        help="whether all ranks meet between two steps, or a rank may begin the next step while others still work "
        '(default: what INPUT says in "steps", else meet)',
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.extra_microbatches and not args.defer:
        raise PlanInputError(f"--extra-microbatches is {args.extra_microbatches}: it needs --defer")
    data = load_json(args.input)
    if args.defer and isinstance(data, dict):
        data = {**data, "defer": True, "extra_microbatches": args.extra_microbatches}
    if args.steps and isinstance(data, dict):
        data = {**data, "steps": args.steps}
    with ProgressLine("tf-adapters plan") as progress:
        plan = plan_from_json(data, progress=progress)
    text = json.dumps(plan.to_json(), indent=2) + "\n"
    if args.out is None:
        sys.stdout.write(text)
        return 0
    write_text("--out", args.out, text)
    print(_summary(plan, args.out))
    return 0


def _integer(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
    return int(text)


def load_json(path: str) -> Any:
    """Return the JSON in a file, or on standard input for ``-``. Raises PlanInputError, one line."""
    name = "standard input" if path == "-" else path
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanInputError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise PlanInputError(f"cannot read {name}: not UTF-8 text") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise PlanInputError(f"{name}: not JSON: {error.msg} at line {error.lineno}") from error
    except RecursionError as error:
        raise PlanInputError(f"{name}: not JSON: nested too deeply") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits with a plain ValueError.
        raise PlanInputError(f"{name}: not JSON: {str(error).splitlines()[0]}") from error


def _refuse_constant(literal: str) -> NoReturn:
    raise PlanInputError(f"{literal} is not JSON: numbers are finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise PlanInputError(f"field {key!r} is there twice in one object")
        out[key] = value
    return out


def _summary(plan: FreezePlan, out: str) -> str:
    times, name = plan.span_ms, "period" if plan.period_ms else "batch"
    host = "" if times.host is None else f"{times.host:.6g} ms in the host's order, weight gradients deferred "
    return (
        f"{out}: {name} {host}{times.unfrozen:.6g} -> {times.planned:.6g} ms"
        f" (fully frozen {times.fully_frozen:.6g}), mean freeze ratio {plan.mean_freeze_ratio:.3f}"
    )
