"""When a step checks the taps, and what taps have seen between two checks, on one rank.

The first step of each process checks all layers: code may have changed since a checkpoint was saved. Layers that it
could not prove are tried again 1, 2, 4, 8, ... steps after it: their gradient was zero, or they did not run. Later,
each audit checks all layers again, since the user's code may use a gradient in another way from some step on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tf_adapters.log import announce
from tf_adapters.measuring.phase import Phase
from tf_adapters.training.tap_findings import TapFindings, shown
from tf_adapters.weight_gradients.stand_ins import around_backwards
from tf_adapters.weight_gradients.taps import StageTaps

AUDIT_INTERVAL = 700
"""Steps from audit to audit. An audit costs about 0.6 steps: the host's order instead of the plan's, and the weight
gradients a second time. That is below 0.1% of the time."""

_MOST_NOTES = 20

AUDITED = (Phase.PLANNING, Phase.PROGRESSIVE, Phase.STABLE)
"""Phases with audits. The other phases have few steps, and the plan is made from their times."""


def compilations() -> int:
    """Return how many graphs torch.compile has made in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


class TapChecks:
    """The checks of one rank's taps."""

    def __init__(self, taps: Mapping[int, StageTaps]) -> None:
        self._taps = taps
        self.notes: list[str] = []
        self.copied_bytes: dict[int, int] = {}
        self.compilations: dict[str, int] = {}  # of this process: up to its first step, and later
        self.all = False  # whether the step that runs checks all layers
        self.again = False  # whether it only tries again the layers that are not proven
        self.accumulates_early = False  # whether a forward or a loss has accumulated gradients, in any check

    @property
    def run(self) -> bool:
        """Return whether the step that runs checks any layers."""
        return self.all or self.again

    def begin_step(self, step: int, phase: Phase, findings: TapFindings | None, waits: bool) -> None:
        """Decide whether this step checks taps; equal on all ranks, as ``findings`` are.

        A step that ``waits`` for an update that does not seem to come checks nothing: it may never end.
        """
        if waits:
            self.forget()
        elif findings is None:
            self.accumulates_early &= self.all  # in another batch of the same check
            self.all, self.again = True, False
        else:
            since = step - findings.first_step
            self.all = step % AUDIT_INTERVAL == 0 and phase in AUDITED
            self.again = not self.all and findings.has_unproven and since & (since - 1) == 0

    def forget(self) -> None:
        """Give up a check that has begun."""
        self.all = self.again = False
        for taps in self._taps.values():
            taps.end_check()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward or a loss of a step that checks all taps, and note whether it runs a backward.

        If it does, a plan must not move forwards past backwards: gradients would be added up in another order.
        """

        def run(host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.accumulates_early |= bool(kwargs.get("accumulate_grad"))
            return host(*args, **kwargs)

        with around_backwards(run):
            yield

    def begin_batch(self) -> None:
        """Drop what a batch that failed has left."""
        for taps in self._taps.values():
            taps.begin_batch()

    def end_step(self, step: int) -> None:
        """Say what taps have seen in a step for the first time. Note what they have copied, and what was compiled."""
        compiled = compilations()
        first = self.compilations.setdefault("first_step", compiled)
        self.compilations["later"] = compiled - first
        for stage, taps in self._taps.items():
            taps.stop_watching()
            self.copied_bytes[stage], taps.copied_bytes = taps.copied_bytes, 0
            seen = taps.take_surprises()
            for reason in dict.fromkeys(seen.values()):
                names = shown([name for name, why in seen.items() if why == reason])
                self._warn(
                    f"step {step}, stage {stage}: from now on the host itself computes the weight gradient of {names}: "
                    f"{reason}"
                )

    def _warn(self, text: str) -> None:
        """Log a warning on this rank and note it for the report. Other ranks do not know of it."""
        self.notes.append(text)
        del self.notes[:-_MOST_NOTES]
        announce(0, text, logging.WARNING)
