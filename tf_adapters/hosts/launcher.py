"""What the launcher modules share: run a script, and end with one line where freezing cannot run."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tf_adapters.errors import TimelyFreezeError

__all__ = ["run_script"]


def run_script(module: str, script: str, arguments: list[str]) -> None:
    """Run ``script`` as ``__main__``, as ``python script arguments`` would.

    An error of ours becomes one line on rank 0's stderr and exit status 2 on every rank. Raises SystemExit with one
    line where there is no such script.
    """
    path = Path(script)
    if not path.is_file():
        raise SystemExit(f"{module}: no such script: {script}")
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)  # it imports its neighbours
    try:
        runpy.run_path(str(path), run_name="__main__")
    except TimelyFreezeError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{module}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
