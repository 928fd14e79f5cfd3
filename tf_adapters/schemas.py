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
            limits = f"from {_shown(low)} to {_shown(high)}"
        case {"minimum": low}:
            limits = f"of at least {_shown(low)}"
        case {"exclusiveMinimum": low, "maximum": high}:
            limits = f"above {_shown(low)}, up to {_shown(high)}"
        case {"exclusiveMinimum": low}:
            limits = f"above {_shown(low)}"
    return [f"{'an integer' if schema['type'] == 'integer' else 'a number'} {limits}"]


def _shown(limit: float) -> str:
    """Return a limit as people write it: 0.5, 2, 1,000,000."""
    return f"{int(limit):,}" if limit == int(limit) else f"{limit:g}"
