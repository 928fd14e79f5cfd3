"""``tf-adapters simulate``: the gain of freezing in a schedule, without a training."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from tf_adapters.cli.outputs import check_outputs, write_outputs
from tf_adapters.cli.plan import load_json
from tf_adapters.cli.progress import ProgressLine
from tf_adapters.cli.simulate_arguments import add_arguments, read_options
from tf_adapters.report.page import print_page, terminal_width
from tf_adapters.simulate.goal_comparison import goal_points
from tf_adapters.simulate.simulation import Simulation, simulate
from tf_adapters.simulate.simulation_page import chart_panels, comparison_page, planned_panels, simulation_page
from tf_adapters.simulate.sources import Request, read_request

_DESCRIPTION = """\
What TimelyFreeze would bring to a pipeline: batch time, bubbles, critical path, freeze ratios, the gain at r_max and
the most that any r_max could give without deferral; for one schedule in detail, for several side by side.
Gains are in throughput, over the same schedule with nothing frozen."""
_EXAMPLES = """\
examples:
  tf-adapters simulate runs/demo/timely_freeze/report.json
  tf-adapters simulate --schedule 1f1b --stages 4 --microbatches 8 --forward-ms 10,10,11,13 --backward-ms 20
  tf-adapters simulate --schedule gpipe,1f1b,interleaved,zbv --ranks 4 --microbatches 8 --model llama-8b --png all.png
Stages are counted over the whole pipeline: zbv with --stages 8 has two on each of 4 ranks. With --ranks alone, times
are per rank, and a schedule with two stages on a rank cuts each in two: so schedules are compared on the same model.
Exit status: 0, 2 for wrong input, 1 when the solver fails."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="what freezing would bring to a schedule, from measured or assumed times",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = read_options(args)
    check_outputs(args)
    with ProgressLine("tf-adapters simulate") as progress:
        progress("orders of actions")
        request = read_request(options, load_json)
        ratio, extra = request.max_freeze_ratio, request.extra_microbatches
        simulations = [
            simulate(each, ratio, options.sweep, progress=progress, extra_microbatches=extra)
            for each in request.pipelines
        ]
        if len(simulations) == 1:
            simulations[0] = replace(simulations[0], goals=goal_points(request.pipelines[0], progress))
    _output(args, request, simulations)
    return 0


_DRAWN_TWICE = 3
"""A picture of up to this many schedules has each before and after. With more, a dotted line marks the end before."""


def _output(args: argparse.Namespace, request: Request, simulations: list[Simulation]) -> None:
    source, notes = request.source, request.notes
    if len(simulations) == 1:
        page = simulation_page(simulations[0], source, notes, width=terminal_width(), step_ms=request.step_ms)
        headline = f"Simulated, {simulations[0].pipeline.name}"
    else:
        page, headline = comparison_page(simulations, source, notes), "Simulated"
    panels = chart_panels(simulations)
    many = len(simulations) > _DRAWN_TWICE
    drawn = planned_panels(simulations) if many else panels
    unfrozen = [each.unfrozen.end_ms for each in simulations for _ in ([each.planned] if many else each.panels)]
    lines = write_outputs(args, panels, headline, compared_ms=unfrozen, drawn=drawn)
    if args.json:
        data = {
            "times": source,
            "notes": list(notes),
            "measured_step_ms": request.step_ms,
            "simulations": [s.to_json() for s in simulations],
        }
        print(json.dumps(data, indent=1, allow_nan=False))
        return
    print_page(replace(page, panels=()) if args.no_gantt else page)
    for line in lines:
        print(f"\n{line}")
