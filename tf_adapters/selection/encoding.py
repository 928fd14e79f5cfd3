"""Arrays as JSON values, bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np


def encode(array: np.ndarray) -> dict[str, Any]:
    """Return the type and the bytes of a one-dimensional array."""
    little = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "base64": base64.b64encode(little.tobytes()).decode("ascii")}


def decode(data: Mapping[str, Any]) -> np.ndarray:
    """The inverse of ``encode``."""
    stored = np.dtype(data["dtype"]).newbyteorder("<")
    return np.frombuffer(base64.b64decode(data["base64"]), stored).astype(data["dtype"])
