"""Replace a function of a module, and restore it."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class PatchError(RuntimeError):
    """A symbol cannot be replaced, or not be put back. The message is one line that names its path."""


def argument(function: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a function that reads one argument from a call of ``function``: by position, by name, or its default.

    It is cheaper than binding the signature in every call, and these functions are called for every microbatch. A
    wrapper that takes any name, such as ms-swift's ``_batched_p2p_ops(**kwargs)``, is called with names.
    """
    parameters = inspect.signature(function).parameters
    if name not in parameters:
        return lambda args, kwargs: kwargs.get(name)
    position, default = list(parameters).index(name), parameters[name].default
    default = None if default is inspect.Parameter.empty else default
    return lambda args, kwargs: args[position] if position < len(args) else kwargs.get(name, default)


class Patch:
    """Replaces ``module.symbol`` by a wrapper until ``revert``.

    A module looks up its own globals at each call, so the order of imports does not matter. A symbol that other modules
    import by name needs ``everywhere``.

    Args:
        module: the module's full name.
        symbol: the function's name in it, or ``Class.method``.
        arguments: names of its arguments that the wrapper reads.
        everywhere: also replace the name in all loaded modules that have imported the function.
        but: modules that keep the original then.
    """

    def __init__(
        self, module: str, symbol: str, *arguments: str, everywhere: bool = False, but: Sequence[str] = ()
    ) -> None:
        self.module, self.symbol, self.arguments = module, symbol, arguments
        self._everywhere, self._but = everywhere, but
        self.path, self._name = f"{module}.{symbol}", symbol.rpartition(".")[2]
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None

    @property
    def applied(self) -> bool:
        return self._original is not None

    def apply(self, wrapper: Wrapper) -> None:
        """Replace the symbol by ``wrapper(original)``. Do nothing if it is already replaced.

        Raises PatchError, which names the path, if the module or symbol does not exist.
        """
        if self.applied:
            return
        original = self.check()
        replacement = functools.update_wrapper(wrapper(original), original)
        self._exchange(original, replacement)
        self._original, self._replacement = original, replacement

    def handle(self, handler: Callable[..., Any]) -> None:
        """Let ``handler(run, *arguments)`` answer every call.

        ``run()`` makes the original call. ``arguments`` are the values of the patch's ``arguments`` in this call.
        """

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            getters = [argument(original, name) for name in self.arguments]

            def call(*args: Any, **kwargs: Any) -> Any:
                run = functools.partial(original, *args, **kwargs)
                return handler(run, *(get(args, kwargs) for get in getters))

            return call

        self.apply(wrapper)

    def check(self) -> Callable[..., Any]:
        """Return the current symbol. Raises PatchError, which names the missing symbol or argument."""
        function: Any = getattr(self._owner(), self._name, None)
        problem = None
        if not callable(function):
            problem = f"this Megatron has no {self.path}"
        elif (missing := _not_taken(function, self.arguments)) is not None:
            problem = f"this Megatron's {self.path} has no argument {missing}"
        if problem:
            raise PatchError(
                f"timely_freeze cannot run here: {problem}; run `tf-adapters doctor` for the versions that work"
            )
        return function  # type: ignore[no-any-return]

    def check_revert(self) -> None:
        """Raise PatchError if other code has wrapped the symbol since, because a revert would undo that."""
        if self.applied and getattr(self._owner(), self._name, None) is not self._replacement:
            raise PatchError(
                f"timely_freeze cannot be taken back: {self.path} was replaced by other code; take that back first"
            )

    def revert(self) -> None:
        """Restore the original if the symbol is replaced. Raises PatchError as ``check_revert`` does."""
        self.check_revert()
        if self._original is not None:
            self._exchange(self._replacement, self._original)
            self._original = self._replacement = None

    def _exchange(self, old: Any, new: Any) -> None:
        """Put ``new`` in the place of ``old``, and with ``everywhere`` in all modules that have imported ``old``."""
        setattr(self._owner(), self._name, new)
        if not self._everywhere:
            return
        for name, module in tuple(sys.modules.items()):
            if name not in self._but and getattr(module, "__dict__", {}).get(self._name) is old:
                setattr(module, self._name, new)

    def _owner(self) -> Any:
        """Return the module, or the class in it whose method is replaced; None if the class does not exist."""
        try:
            owner: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise PatchError(
                f"timely_freeze cannot run here: there is no {self.module} ({error}); is Megatron on the path?"
            ) from None
        for part in self.symbol.split(".")[:-1]:
            owner = getattr(owner, part, None)
        return owner


def handle_all(handlers: Mapping[Patch, Callable[..., Any]]) -> None:
    """Let each handler answer the calls of its patch. If a ``check`` fails, it raises and nothing is replaced."""
    for patch in handlers:
        patch.check()
    for patch, handler in handlers.items():
        patch.handle(handler)


def revert_all(patches: Iterable[Patch]) -> None:
    """Restore all originals. Raises PatchError, and restores nothing, if other code has wrapped a symbol since."""
    known = tuple(patches)
    for patch in known:
        patch.check_revert()
    for patch in known:
        patch.revert()


def _not_taken(function: Callable[..., Any], names: Sequence[str]) -> str | None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return next((name for name in names if name not in parameters), None)
