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

_SUBCOMMANDS = tuple(f"tf_adapters.cli.{name}" for name in ("plan", "simulate", "show", "balance", "configs", "doctor"))
"""Modules with ``add_parser(subparsers)``, which sets ``run``: from the arguments to an exit status. Errors of ours are
one line on stderr, and status 2, or 1 where the solver failed."""


class _Parser(argparse.ArgumentParser):
    """A page of usage would hide the one line that says what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; theirs end with one line for wrong arguments too."""
    parser = _Parser(prog="tf-adapters", description="TimelyFreeze for pipeline-parallel training: plan, look, check.")
    parser.add_argument("--version", action="version", version=f"tf-adapters {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for module in _SUBCOMMANDS:
        importlib.import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TimelyFreezeError, OSError) as error:
        print(f"tf-adapters {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, SolverError) else 2
    return status
