"""The arguments that ask for pictures and traces, the same for ``show`` and ``simulate``."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.report.gantt import draw_panels
from tf_adapters.report.layout import Panel
from tf_adapters.report.schema import write_atomically
from tf_adapters.report.trace import write_trace

_LONGEST_NAME = 255  # bytes, on Linux


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--png``, ``--svg``, ``--trace`` and ``--no-gantt``."""
    group = parser.add_argument_group("pictures")
    group.add_argument("--png", metavar="FILE", help="draw the batch before and after, on one time axis, as PNG")
    group.add_argument("--svg", metavar="FILE", help="the same as SVG")
    group.add_argument("--trace", metavar="FILE", help="the same as a Chrome trace: open it in ui.perfetto.dev")
    group.add_argument("--no-gantt", action="store_true", help="print no chart")


def asked_for(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return (argument, file) of every picture or trace in the arguments."""
    files = ((f"--{name}", getattr(args, name)) for name in ("png", "svg", "trace"))
    return tuple((name, path) for name, path in files if path is not None)


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ConfigError if a file cannot be written, before any work; UnsupportedError if matplotlib is missing."""
    for name, path in asked_for(args):
        if not _can_be_a_file(path):
            raise ConfigError(f"{name}: {path!r} is not a file's name")
        if name != "--trace" and Path(path).suffix.lower() not in ("", f".{name[2:]}"):
            raise ConfigError(f"{name}: {path!r} is another kind of file: its name must end in .{name[2:]}")
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{name}: cannot write {path}: the folder {Path(path).parent} does not exist")
        if name != "--trace" and importlib.util.find_spec("matplotlib") is None:
            raise UnsupportedError(f"{name}: pictures need matplotlib: pip install matplotlib")


def _can_be_a_file(path: str) -> bool:
    try:
        name = os.fsencode(Path(path).name)
    except UnicodeEncodeError:
        return False
    return bool(path) and "\0" not in path and len(name) <= _LONGEST_NAME and not Path(path).is_dir()


def write_text(option: str, path: str, text: str) -> None:
    """Write a file as a whole. Raises ConfigError if it cannot be written."""
    try:
        write_atomically(Path(path), text)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}: cannot write {path!r}: {reason}") from None


def write_outputs(
    args: argparse.Namespace,
    panels: Sequence[Panel],
    headline: str,
    compared_ms: Sequence[float] | None = None,
    drawn: Sequence[Panel] | None = None,
) -> tuple[str, ...]:
    """Write the pictures and traces in the arguments, and return a line about each file.

    ``drawn`` are the panels of a picture, by default all; ``compared_ms`` has a time for each of them, as in
    ``draw_panels``. Raises ConfigError if a file cannot be written.
    """
    lines = []
    for name, path in asked_for(args):
        try:
            if name == "--trace":
                write_trace(panels, path)
            else:
                draw_panels(
                    drawn or panels,
                    headline,
                    path=path,
                    fmt="png" if name == "--png" else "svg",
                    compared_ms=compared_ms,
                )
        except OSError as error:
            raise ConfigError(f"{name}: cannot write {path}: {error.strerror or error}") from None
        lines.append(f"{'trace' if name == '--trace' else 'picture'}: {path}")
    return tuple(lines)
