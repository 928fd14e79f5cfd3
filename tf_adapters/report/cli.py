"""``tf-adapters show REPORT.json``: the summary of a run, and its Gantt chart on request."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.report.gantt import draw
from tf_adapters.report.schema import Report
from tf_adapters.report.terminal import print_summary

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``show`` to the command line."""
    about = "show what freezing brought to a run, from its report.json"
    parser = subparsers.add_parser("show", help=about, description=f"tf-adapters show: {about}.")
    parser.add_argument("report", metavar="REPORT.json", help="<output_dir>/timely_freeze/report.json of a run")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--png", metavar="FILE", help="also draw the batch, before and after, as PNG")
    picture.add_argument("--svg", metavar="FILE", help="the same as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary and draw what was asked for; 0, or 2 with one line on stderr."""
    try:
        report = Report.read(args.report)
        print_summary(report)
        if args.png:
            draw(report, args.png, "png")
        elif args.svg:
            draw(report, args.svg, "svg")
        print(_about_pictures(report, args), flush=True)
    except BrokenPipeError:
        # The reader, such as head, has seen enough: no error, and nothing left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TimelyFreezeError, OSError) as error:
        print(f"tf-adapters show: {error}", file=sys.stderr)
        return 2
    return 0


def _about_pictures(report: Report, args: argparse.Namespace) -> str:
    if args.png or args.svg:
        return f"\npicture: {args.png or args.svg}"
    if report.times and importlib.util.find_spec("matplotlib") is not None:
        return "\npicture: add --png FILE or --svg FILE to draw this batch before and after"
    return ""
