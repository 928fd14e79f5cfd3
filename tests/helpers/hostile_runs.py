"""A run of a hostile situation on one rank of a host, with all that it is compared by."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Protocol

from hostile import Situation
from logged import Lines

from tf_adapters.testing import RankPool, RanksFailed

SECTION: dict[str, Any] = {"goal": "exact", "warmup_steps": 1, "monitoring_steps": 100}
STEPS, MICROBATCHES = 5, 4
RATIOS: dict[str, float | None] = {"monitoring": None, "a plan that defers": 0.0}
"""The freeze ratio of a plan that is in force from the first step on; None: no plan."""


class HostRun(Protocol):
    """One rank's part of a run. ``adapter`` is None for the host alone."""

    adapter: Any

    def step(self, number: int) -> dict[str, Any]:
        """Make one update. Return copies of its gradients and of the new weights, by name."""


def nothing(raised: str = "") -> dict[str, Any]:
    """Return what is known of a run on one rank before it begins.

    It is what each step left, the package's number of the first step, the lines that a user saw, the error that ended
    the run, and the state that it saved.
    """
    return {"steps": [], "first": 1, "said": [], "raised": raised, "saved": {}}


def trained(
    situation: Situation, start: Callable[[], HostRun], found: dict[str, Any] | None = None, state: Any = None
) -> dict[str, Any]:
    """Run a situation on this rank, add what it leaves to ``found``, and return that.

    ``state`` is the ``saved`` of another run, to resume from.
    """
    found = nothing() if found is None else found
    with situation.around, Lines(logging.WARNING) as lines:
        host = start()
        if state is not None:
            host.adapter.load_state_dict(state)
        if host.adapter is not None:
            found["first"] = host.adapter.controller.step
        for number in range(STEPS):
            found["steps"].append(host.step(number))
        if host.adapter is not None:
            found["said"] += host.adapter.controller.state.notes
            found["saved"] = host.adapter.state_dict()
            host.adapter.detach()
    found["said"] += lines.seen
    return found


def on_ranks(pool: RankPool, train: Callable[..., dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
    """Run ``train`` on all ranks. An error ends the ranks, and is the ``raised`` of each of them."""
    try:
        return pool.run(train, *args, timeout_s=30.0)
    except RanksFailed as failed:
        lines = [line.strip() for line in str(failed).splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        ours = [line for line in errors if line.startswith("tf_adapters.errors.")]
        return [nothing([*ours, *errors, "no answer in time"][0])] * pool.size
