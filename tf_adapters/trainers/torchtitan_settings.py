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
    """``--timely_freeze.enable``, ``--timely_freeze.max_freeze_ratio``: as TorchTitan spells arguments."""
    return f"--{SECTION}.{name or 'enable'}"


class JobSettings:
    """The settings of the command line and the TOML file. An argument wins over the file."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read ours from a command line; ``rest`` is TorchTitan's.

        Ends the program with one line where an argument is wrong, before anything starts.
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
        """Take ``[timely_freeze]`` out of a TOML file's values; returns what is left for TorchTitan.

        Raises ConfigError: one line that names the wrong setting.
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
        """The settings; None where nothing switches freezing on. Reports go to ``output_dir`` by default.

        Ends the program with one line where a setting is given but freezing is not switched on.
        """
        settings = config_from_args(self._parser.parse_known_args(self._arguments)[0], dotted)
        return None if settings is None else settings.reporting_in(output_dir)


def _as_typed(argument: str) -> str:
    """TorchTitan takes ``--timely-freeze.max-freeze-ratio`` too."""
    option, equals, value = argument.partition("=")
    if re.match(r"--timely[-_]freeze\.", option):
        return "--" + option[2:].replace("-", "_") + equals + value
    return argument
