"""Attributes of a host's objects that are replaced for a while, and a way back."""

from __future__ import annotations

from typing import Any

_ABSENT: Any = object()


class Overrides:
    """Sets attributes on instances and puts back exactly what was there, an absent attribute included."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` on this one object, whether its class or the object itself defines it."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Take every replacement back, the last one first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
