"""``tf-adapters show REPORT.json``: the summary of a run, also while it goes on; pictures, traces and a table of it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace

from tf_adapters.advice.levers import levers, levers_table
from tf_adapters.cli.outputs import add_output_arguments, asked_for, check_outputs, write_outputs, write_text
from tf_adapters.cli.progress import ProgressLine
from tf_adapters.errors import TimelyFreezeError
from tf_adapters.report.action_table import action_csv
from tf_adapters.report.layout import Panel, panels_of
from tf_adapters.report.page import Page, print_page
from tf_adapters.report.plots import draw_plots
from tf_adapters.report.schema import Report
from tf_adapters.report.terminal import page


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show what freezing brought to a run, from its report.json; also while the run goes on"
    parser = subparsers.add_parser("show", help=about, description=f"tf-adapters show: {about}.")
    parser.add_argument("report", metavar="REPORT.json", help="<output_dir>/timely_freeze/report.json of a run")
    add_output_arguments(parser)
    plots = "draw the ranks' time, backward times and freeze ratios into FOLDER"
    parser.add_argument("--plots", metavar="FOLDER", help=plots)
    table = (
        "write a row for each action into FILE: measured and planned ms, freeze ratio; - prints it, and nothing else"
    )
    parser.add_argument("--csv", metavar="FILE", help=table)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = Report.read(args.report)
    check_outputs(args)
    if args.csv == "-":
        sys.stdout.write(action_csv(report))
        return 0
    if args.csv is not None:
        write_text("--csv", args.csv, action_csv(report))
    panels = panels_of(report) if asked_for(args) else _panels_if_any(report)
    shown = page(report, () if args.no_gantt else panels)
    print_page(_with_levers(shown, report) if report.config.get("method") == "none" else shown)
    lines = write_outputs(args, panels, f"One batch on {report.host.name}")
    lines += (f"table: {args.csv}",) if args.csv else ()
    lines += tuple(f"picture: {path}" for path in draw_plots(report, args.plots)) if args.plots else ()
    print("".join(f"\n{line}" for line in lines or _hint(panels)))
    return 0


def _with_levers(shown: Page, report: Report) -> Page:
    """Add the gain of each lever to the page of a run that only measured. If planning fails, add a note instead."""
    if not report.times:
        return shown
    try:
        with ProgressLine("tf-adapters show") as progress:
            found = levers(report, progress)
    except TimelyFreezeError as error:
        return replace(shown, notes=(*shown.notes, f"what levers would bring is not known: {error}"))
    return replace(shown, tables=(levers_table(found), *shown.tables), notes=(*found.notes, *shown.notes))


def _panels_if_any(report: Report) -> tuple[Panel, ...]:
    """Return no panels for a run without measured times or with a wrong schedule: its summary is shown all the same."""
    try:
        return panels_of(report)
    except TimelyFreezeError:
        return ()


def _hint(panels: tuple[Panel, ...]) -> tuple[str, ...]:
    if not panels:
        return ()
    drawn = "--png FILE or --svg FILE to draw this batch, " if importlib.util.find_spec("matplotlib") else ""
    return (f"add {drawn}--trace FILE for a trace that Perfetto opens",)
