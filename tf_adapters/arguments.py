"""The settings as command-line arguments: field ``x_y`` is ``--timely-freeze-x-y``, made from the one schema.

``--timely-freeze`` alone switches freezing on.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from tf_adapters.config import REMOVED, RETIRED, SECTION, TimelyFreezeConfig, allowed, read_setting
from tf_adapters.errors import ConfigError
from tf_adapters.goals import LEVERS

Spelling = Callable[[str], str]
"""Gives the option of a setting by its name; an empty name stands for the switch."""
_FIELDS = {name: field for name, field in TimelyFreezeConfig.model_fields.items() if name != "enabled"}
_OLD = (*RETIRED, *REMOVED)


def dashed(name: str) -> str:
    """``--timely-freeze``, ``--timely-freeze-max-freeze-ratio``: as Megatron-LM and most scripts spell arguments."""
    return "-".join(["--timely-freeze", *(name.split("_") if name else [])])


def add_arguments(parser: argparse.ArgumentParser, spelling: Spelling = dashed) -> argparse.ArgumentParser:
    """Add the group ``timely freeze`` to a parser, unless it is there already; returns the parser."""
    if spelling("") in parser._option_string_actions:
        return parser
    group = parser.add_argument_group("timely freeze", "Freeze weight gradients where they hold the pipeline up.")
    group.add_argument(spelling(""), dest=SECTION, action="store_true", help="switch freezing on")
    for name, field in _FIELDS.items():
        description = f"{field.description}; allowed: {allowed(name)}".replace("%", "%%")
        group.add_argument(
            spelling(name),
            dest=f"{SECTION}_{name}",
            type=_reader(parser, name, spelling(name)),
            default=_default(name),
            metavar=name.split("_")[-1].upper(),
            help=f"{description} (default: {'by goal' if name in LEVERS else field.default})",
        )
    for name in _OLD:
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(spelling(name), dest=f"{SECTION}_{name}", **options)
    _check_after_parsing(parser, spelling)
    return parser


def config_from_args(args: argparse.Namespace, spelling: Spelling = dashed) -> TimelyFreezeConfig | None:
    """Return the settings of a parsed command line; None without ``--timely-freeze``.

    Raises ConfigError if a setting is given but freezing is not switched on.
    """
    given = vars(args)
    settings = {name: given[f"{SECTION}_{name}"] for name in (*_FIELDS, *_OLD) if f"{SECTION}_{name}" in given}
    settings = {name: value for name, value in settings.items() if value is not None or name not in LEVERS}
    if given.get(SECTION) or settings.keys() & REMOVED.keys():
        return TimelyFreezeConfig(**settings)
    for name, value in settings.items():
        if name in _FIELDS and value != _default(name):
            option, switch = spelling(name), spelling("")
            raise ConfigError(f"{option} is {value!r}, but {switch} is not given: give it, or leave {option} out")
    return None


def _default(name: str) -> Any:
    """Return the value of an argument that is not given; None leaves it to the goal."""
    return None if name in LEVERS else _FIELDS[name].default


def _check_after_parsing(parser: argparse.ArgumentParser, spelling: Spelling) -> None:
    """End the program with one line if settings are given without the switch, before a host starts anything."""
    parse: Any = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        try:
            config_from_args(namespace, spelling)
        except ConfigError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        return namespace, rest

    vars(parser)["parse_known_args"] = parse_known_args


def _reader(parser: argparse.ArgumentParser, name: str, option: str) -> Callable[[str], Any]:
    """Return a reader of one argument. A wrong value ends the program with one line, without pages of usage."""

    def read(text: str) -> Any:
        for value in _readings(text):
            with contextlib.suppress(ValidationError):
                return read_setting(name, value)
        return parser.exit(2, f"{parser.prog}: error: {option} is {text!r}: allowed is {allowed(name)}\n")

    return read


def _readings(text: str) -> Iterator[str | int | float | bool | list[str] | dict[str, float]]:
    """Yield the possible values of an argument's text. A setting takes the first that it allows."""
    yield text
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            yield convert(text)
    if text in ("true", "false"):
        yield text == "true"
    yield text.split(",")
    with contextlib.suppress(ValueError):
        pairs = (part.rsplit("=", 1) for part in text.split(","))
        yield {key: float(value) for key, value in pairs}
