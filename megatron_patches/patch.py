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
        arguments: names of its arguments that the wrapper reads.
    """

    def __init__(self, module: str, symbol: str, *arguments: str) -> None:
        self.module, self.symbol, self.arguments = module, symbol, arguments
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None

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
        self._original, self._replacement = original, replacement

    def check(self) -> Callable[..., Any]:
        """The symbol as it is now. Raises UnsupportedError, naming what is missing: the symbol or an argument."""
        found = getattr(self._import(), self.symbol, None)
        if not callable(found):
            raise UnsupportedError(
                f"timely_freeze cannot run here: this Megatron has no {self.path}; "
                "run `tf-adapters doctor` for the versions that work"
            )
        known = inspect.signature(found).parameters
        for name in self.arguments:
            if name not in known:
                raise UnsupportedError(
                    f"timely_freeze cannot run here: this Megatron's {self.path} has no argument {name}; "
                    "run `tf-adapters doctor` for the versions that work"
                )
        return found  # type: ignore[no-any-return]

    def check_revert(self) -> None:
        """Raise UnsupportedError where somebody else has wrapped the symbol since: putting back would undo theirs."""
        if self.applied and getattr(self._import(), self.symbol, None) is not self._replacement:
            raise UnsupportedError(
                f"timely_freeze cannot be taken back: {self.path} was replaced by other code; take that back first"
            )

    def revert(self) -> None:
        """Put the original back; nothing where the symbol is not replaced. Raises UnsupportedError as the check."""
        self.check_revert()
        if self._original is not None:
            setattr(self._import(), self.symbol, self._original)
            self._original = self._replacement = None

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"timely_freeze cannot run here: there is no {self.module} ({error}); is Megatron on the path?"
            ) from None
