"""Run a training script from a launcher module, and turn our errors into one line."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tf_adapters.errors import TimelyFreezeError


def check_script(module: str, script: str, usage: str) -> None:
    """Raise SystemExit: after printing ``usage`` for ``-h``, or with one line if the script is missing.

    Call it before importing the host, which takes seconds.
    """
    if script in ("-h", "--help"):
        print(usage)
        raise SystemExit(0)
    if not Path(script).is_file():
        raise SystemExit(f"{module}: no such script: {script}")


def run_script(module: str, script: str, arguments: list[str], prepare: Callable[[], object] = lambda: None) -> None:
    """Call ``prepare``, then run ``script`` as ``__main__``, as ``python script arguments`` would."""
    with errors_in_one_line(module):
        run_command([script, *arguments], prepare)


def run_command(command: list[str], prepare: Callable[[], object] = lambda: None) -> None:
    """Call ``prepare``, then do as ``python -m MODULE ...`` or ``python SCRIPT ...`` does."""
    if command[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), command[1:]
        prepare()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        folder = Path(command[0]).resolve().parent  # the script may import modules from it
        sys.path[0], sys.argv = str(folder), command
        prepare()
        runpy.run_path(command[0], run_name="__main__")


@contextmanager
def errors_in_one_line(module: str) -> Iterator[None]:
    """An error of ours becomes one line on rank 0's stderr and exit status 2 on every rank."""
    try:
        yield
    except TimelyFreezeError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{module}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
