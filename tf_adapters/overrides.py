"""Replace attributes of a host's objects for a while, and restore them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tf_adapters.errors import UnsupportedError

_ABSENT: Any = object()


class Overrides:
    """Sets attributes on instances and puts back exactly what was there, an absent attribute included."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, before, ours

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` on this one object, whether its class or the object itself defines it."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._replaced.append((owner, name, before, vars(owner).get(name, _ABSENT)))

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace the function ``owner.name``: a call runs ``around(host's function, *args, **kwargs)``."""
        run = getattr(owner, name)

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(run, *args, **kwargs)

        self.set(owner, name, call)

    def check(self) -> None:
        """Raise UnsupportedError if other code has replaced one of our values since: restoring would undo that."""
        newest = {(id(owner), name): (owner, ours) for owner, name, _, ours in self._replaced}
        for (_, name), (owner, ours) in newest.items():
            if vars(owner).get(name, _ABSENT) is not ours:
                raise UnsupportedError(
                    f"timely_freeze cannot be detached: {type(owner).__name__}.{name} was replaced by other code since "
                    "it was attached; take that back first"
                )

    def restore(self) -> None:
        """Take every replacement back, the last one first. Raises as ``check``; then it restores nothing."""
        self.check()
        while self._replaced:
            owner, name, before, _ = self._replaced.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __enter__(self) -> Overrides:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
