"""The ``tf-adapters`` command: one subcommand in each module."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tf_adapters import __version__
from tf_adapters.errors import SolverError, TimelyFreezeError

__all__ = ["build_parser", "main"]

_SUBCOMMANDS = ("plan", "simulate", "show", "balance", "configs", "check", "schema", "doctor")
"""Modules with ``add_parser(subparsers)``. It sets ``run``, which takes the arguments and returns the exit status."""


class _Parser(argparse.ArgumentParser):
    """Prints one line for a wrong argument: a page of usage would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand."""
    parser = _Parser(prog="tf-adapters", description="TimelyFreeze for pipeline-parallel training: plan, look, check.")
    parser.add_argument("--version", action="version", version=f"tf-adapters {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name in _SUBCOMMANDS:
        importlib.import_module(f"tf_adapters.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. After an error of ours, one line on stderr, return 1 if the solver failed, else 2."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # the line names the subcommand, which has the arguments
        parser.prog = f"{parser.prog} {args.command}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it. Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TimelyFreezeError, OSError) as error:
        print(f"tf-adapters {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, SolverError) else 2
    return status
