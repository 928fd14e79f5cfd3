"""JSON schemas and names in words, for messages that say what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
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


def unknown_keys(section: str, keys: Iterable[str], known: Sequence[str]) -> str:
    """Return a line about unknown keys: the name that each may mean, or once all names that are known."""
    close = {key: difflib.get_close_matches(key, known, n=1, cutoff=0.6) for key in keys}
    hints = [f'{quoted(key)}: did you mean "{names[0]}"?' for key, names in close.items() if names]
    far = [quoted(key) for key, names in close.items() if not names]
    if far:
        hints.append(f"{', '.join(far)}: allowed are {', '.join(known)}")
    return "; ".join(f"{section} has an unknown key {hint}" for hint in hints)


def quoted(text: object) -> str:
    """Return the text in double quotes, on one line."""
    return json.dumps(str(text), ensure_ascii=False)


def _shown(limit: float) -> str:
    """Return a limit as people write it: 0.5, 2, 1,000,000."""
    return f"{int(limit):,}" if limit == int(limit) else f"{limit:g}"
