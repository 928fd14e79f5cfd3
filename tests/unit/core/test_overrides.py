"""Attributes of somebody else's object, replaced for a while."""

from __future__ import annotations

import pytest

from tf_adapters.errors import UnsupportedError
from tf_adapters.overrides import Overrides


class Host:
    of_class = "class"

    def __init__(self) -> None:
        self.own = "own"

    def method(self) -> str:
        return "host"


def test_an_attribute_of_the_object_is_put_back() -> None:
    host, overrides = Host(), Overrides()
    original = host.own
    overrides.set(host, "own", "ours")
    assert host.own == "ours"
    overrides.restore()
    assert host.own is original
    assert vars(host) == {"own": "own"}


def test_an_attribute_of_the_class_is_hidden_on_one_object_only() -> None:
    host, other, overrides = Host(), Host(), Overrides()
    overrides.set(host, "of_class", "ours")
    overrides.set(host, "method", lambda: "ours")
    assert (host.of_class, host.method()) == ("ours", "ours")
    assert (other.of_class, other.method()) == ("class", "host")
    overrides.restore()
    assert (host.of_class, host.method()) == ("class", "host")
    assert vars(host) == {"own": "own"}


def test_an_attribute_that_was_not_there_is_gone_again() -> None:
    host, overrides = Host(), Overrides()
    overrides.set(host, "new", 1)
    overrides.restore()
    assert not hasattr(host, "new")


def test_an_attribute_set_to_none_is_put_back_as_none() -> None:
    host, overrides = Host(), Overrides()
    host.own = None  # type: ignore[assignment]
    overrides.set(host, "own", "ours")
    overrides.restore()
    assert vars(host) == {"own": None}


def test_the_last_replacement_is_taken_back_first() -> None:
    host, overrides = Host(), Overrides()
    overrides.set(host, "own", "first")
    overrides.set(host, "own", "second")
    overrides.set(host, "of_class", "first")
    overrides.set(host, "of_class", "second")
    overrides.restore()
    assert host.own == "own"
    assert vars(host) == {"own": "own"}


def test_restoring_again_changes_nothing() -> None:
    host, overrides = Host(), Overrides()
    overrides.set(host, "own", "ours")
    overrides.restore()
    host.own = "theirs"
    overrides.restore()
    assert host.own == "theirs"


def test_what_somebody_else_has_wrapped_since_is_not_taken_back() -> None:
    host, overrides = Host(), Overrides()
    overrides.set(host, "own", "ours")
    overrides.set(host, "method", lambda: "ours")
    host.method = lambda: "theirs"  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"Host\.method was replaced by other code since it was attached"):
        overrides.restore()
    assert (host.own, host.method()) == ("ours", "theirs")  # nothing was taken back


def test_a_wrapped_function_gets_the_hosts_and_is_put_back() -> None:
    host, overrides = Host(), Overrides()
    overrides.wrap(host, "method", lambda run, text="": f"{run()} {text}")
    assert host.method("and ours") == "host and ours"  # type: ignore[call-arg]
    assert host.method.__name__ == "method"
    overrides.restore()
    assert vars(host) == {"own": "own"}
    assert host.method() == "host"
