"""The command line of a benchmark."""

from __future__ import annotations

import argparse


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help prints a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
