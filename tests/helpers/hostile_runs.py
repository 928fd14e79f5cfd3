"""A run of a hostile situation on one rank of a host, with all that it is compared by."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from hostile import Situation
from logged import Lines
from stage_runs import on_both
from stage_training import forget_groups

SECTION: dict[str, Any] = {"goal": "exact", "warmup_steps": 1, "monitoring_steps": 100}
STEPS, MICROBATCHES = 5, 4


class HostRun(Protocol):
    """One rank's part of a run. ``adapter`` is None for the host alone."""

    adapter: Any

    def step(self, number: int) -> dict[str, Any]:
        """Make one update. Return copies of its gradients and of the new weights, by name."""


def trained(situation: Situation, start: Callable[[], HostRun], state: Any = None) -> dict[str, Any]:
    """Run a situation on this rank: what each step leaves, the lines that a user sees, the error that ended the run.

    ``state`` is the ``saved`` of another run, to resume from. An error on one rank ends the run on both: the other one
    waits in groups that are destroyed. Nothing may hold the host's objects after ``start``.
    """
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {"steps": steps, "said": [], "saved": {}}

    def run() -> None:
        host = start()
        if state is not None:
            host.adapter.load_state_dict(state)
        for number in range(STEPS):
            steps.append(host.step(number))
        if host.adapter is not None:
            found["said"] += host.adapter.controller.state.notes
            found["saved"] = host.adapter.state_dict()
            host.adapter.detach()

    kept = list(dist.distributed_c10d._world.pg_map)
    with situation.around, Lines(logging.WARNING) as lines:
        _, found["raised"] = on_both(run, kept)
    forget_groups(kept)
    found["said"] += lines.seen
    return found
