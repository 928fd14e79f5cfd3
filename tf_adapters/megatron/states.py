"""Store the state of a run as a file in a checkpoint's folder, for loops whose own files cannot hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf_adapters.config import SECTION
from tf_adapters.log import announce

__all__ = ["read_state", "write_state"]

_FILE = f"{SECTION}.json"


def write_state(folder: str | Path, state: Mapping[str, Any]) -> None:
    """Write the state on this rank. If the disk fails, the state is lost but the run goes on."""
    path = Path(folder) / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(state))
    except OSError as error:
        announce(0, f"the state cannot be saved in {path} ({error.strerror}): a resumed run monitors anew")


def read_state(folder: str | Path) -> Any:
    """Read the state of a checkpoint; None if it is absent or unreadable. Rank 0's state is used."""
    try:
        return json.loads((Path(folder) / _FILE).read_text())
    except (OSError, ValueError):
        return None
