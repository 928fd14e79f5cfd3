"""The settings of a TorchTitan job: arguments ``--timely_freeze.x``, and ``[timely_freeze]`` in its TOML file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError


def dotted(name: str) -> str:
    """Return an option as TorchTitan spells it: ``--timely_freeze.enable``, ``--timely_freeze.max_freeze_ratio``."""
    return f"--{SECTION}.{name or 'enable'}"


class JobSettings:
    """The settings of the command line and the TOML file. An argument overrides the file."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read our arguments from a command line; ``rest`` are TorchTitan's.

        If an argument is wrong, end the program with one line, before anything starts.
        """
        self._parser = argparse.ArgumentParser(
            prog="tf_adapters.trainers.torchtitan", add_help=False, allow_abbrev=False
        )
        add_arguments(self._parser, dotted)
        self._arguments = [_as_typed(argument) for argument in arguments]
        self.rest = self._parser.parse_known_args([dotted(""), *self._arguments])[1]  # the file may switch it on
        unknown = [argument for argument in self.rest if argument.startswith(f"--{SECTION}.")]
        if unknown:
            TimelyFreezeConfig(**{unknown[0].split("=")[0].removeprefix(f"--{SECTION}."): None})

    def take_section(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``[timely_freeze]`` from a TOML file's values, and return the other values, for TorchTitan.

        Raises ConfigError, one line that names the wrong setting.
        """
        left = dict(values)
        section, enable = left.pop(SECTION, {}), False
        if isinstance(section, dict):
            section = dict(section)
            enable = section.pop("enable", False)
        if not isinstance(enable, bool):
            raise ConfigError(f"{SECTION}.enable is {enable!r}: allowed is true or false")
        TimelyFreezeConfig.parse(section)
        self._parser.set_defaults(**{SECTION: enable}, **{f"{SECTION}_{k}": v for k, v in section.items()})
        return left

    def config(self, output_dir: str) -> TimelyFreezeConfig | None:
        """Return the settings; None if freezing is not switched on. Reports go to ``output_dir`` by default.

        If a setting is given but freezing is not switched on, end the program with one line.
        """
        settings = config_from_args(self._parser.parse_known_args(self._arguments)[0], dotted)
        return None if settings is None else settings.reporting_in(output_dir)


def _as_typed(argument: str) -> str:
    """Spell an option of ours with underscores. TorchTitan also accepts ``--timely-freeze.max-freeze-ratio``."""
    option, equals, value = argument.partition("=")
    if re.match(r"--timely[-_]freeze\.", option):
        return "--" + option[2:].replace("-", "_") + equals + value
    return argument
