"""One replaced symbol of a module, with a way back."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tf_adapters.errors import UnsupportedError

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A getter of one argument of calls to ``function``, by position or by name; None where it is not given.

    Cheaper than binding the signature in every call: these functions are called for every microbatch.
    """
    position = list(inspect.signature(function).parameters).index(name)

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(name)

    return get


class Patch:
    """Replaces ``module.symbol`` by a wrapper of it, once, until ``revert``.

    The module looks its own globals up when it calls them, so it does not matter who imported what before. A symbol
    that others import by name must not be patched this way.

    Args:
        module: the module's full name.
        symbol: the function's name in it.
    """

    def __init__(self, module: str, symbol: str) -> None:
        self.module, self.symbol = module, symbol
        self._original: Callable[..., Any] | None = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.symbol}"

    @property
    def applied(self) -> bool:
        return self._original is not None

    def apply(self, wrapper: Wrapper) -> None:
        """Replace the symbol by ``wrapper(original)``; nothing where it is replaced already.

        Raises UnsupportedError, naming the path, where there is no such module or symbol.
        """
        if self.applied:
            return
        module = self._import()
        original = self.check()
        replacement = wrapper(original)
        replacement.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(module, self.symbol, replacement)
        self._original = original

    def check(self) -> Callable[..., Any]:
        """The symbol as it is now. Raises UnsupportedError, naming the path, where it is missing."""
        found = getattr(self._import(), self.symbol, None)
        if not callable(found):
            raise UnsupportedError(
                f"timely_freeze cannot run here: this Megatron has no {self.path}; "
                "run `tf-adapters doctor` for the versions that work"
            )
        return found  # type: ignore[no-any-return]

    def revert(self) -> None:
        """Put the original back; nothing where the symbol is not replaced."""
        if self._original is not None:
            setattr(self._import(), self.symbol, self._original)
            self._original = None

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"timely_freeze cannot run here: there is no {self.module} ({error}); is Megatron on the path?"
            ) from None
