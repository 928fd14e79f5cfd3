"""JSON schemas in words, for messages that say what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_words(schema: Mapping[str, Any]) -> list[str]:
    """Return the values that a JSON schema without alternatives allows."""
    match schema:
        case {"allowed": words}:
            return [words]
        case {"enum": values}:
            return [f'"{value}"' for value in values]
        case {"const": value}:
            return [f'"{value}"']
        case {"type": "boolean"}:
            return ["true", "false"]
        case {"type": "null"}:
            return ["null"]
        case {"minimum": low, "maximum": high}:
            limits = f"from {low:g} to {high:g}"
        case {"minimum": low}:
            limits = f"of at least {low:g}"
        case {"exclusiveMinimum": low, "maximum": high}:
            limits = f"above {low:g}, up to {high:g}"
        case {"exclusiveMinimum": low}:
            limits = f"above {low:g}"
    return [f"{'an integer' if schema['type'] == 'integer' else 'a number'} {limits}"]
