"""Build a script's ``PipelineModule`` in a V, if its DeepSpeed config asks for it.

DeepSpeed's DualPipeVModule is a PipelineModule with two stages on each rank, and takes the same arguments. Before
the script runs, the launcher module replaces the name ``PipelineModule`` by it. The script's own subclasses are
therefore built in a V, too.
Source: deepspeed/runtime/pipe/dualpipev.py.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tf_adapters.config import find_section
from tf_adapters.errors import ConfigError

_CONFIG = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
_PLACES = ("deepspeed", "deepspeed.pipe", "deepspeed.runtime.pipe", "deepspeed.runtime.pipe.module")
"""Modules from which scripts import ``PipelineModule``."""


def place_modules(arguments: Sequence[str]) -> None:
    """Let ``PipelineModule`` be a DualPipeVModule if the config in a script's arguments has ``"placement": "v"``.

    Raises ConfigError if this DeepSpeed has no DualPipeVModule.
    """
    if not _asks_for_v(arguments):
        return
    pipe = importlib.import_module("deepspeed.pipe")
    if not hasattr(pipe, "DualPipeVModule"):
        raise ConfigError(
            'timely_freeze.placement is "v": allowed is "host" here; this DeepSpeed has no DualPipeVModule (0.19.8 has)'
        )
    for name in _PLACES:
        module = importlib.import_module(name)
        if hasattr(module, "PipelineModule"):
            vars(module)["PipelineModule"] = pipe.DualPipeVModule


def _asks_for_v(arguments: Sequence[str]) -> bool:
    return any(map(_has_v, _config_paths(arguments)))


def _has_v(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text())
    except ValueError:
        return False  # DeepSpeed has its own line for it
    section = find_section(config) if isinstance(config, dict) else None
    return isinstance(section, dict) and section.get("placement") == "v" and section.get("enabled", True) is True


def _config_paths(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield what may be the path of the DeepSpeed config among a script's arguments."""
    for place, text in enumerate(arguments):
        option, equals, value = text.partition("=")
        if option not in _CONFIG:
            continue
        if equals:
            yield Path(value)
        elif place + 1 < len(arguments):
            yield Path(arguments[place + 1])
