"""Tells the world of a run: figures after every step, the report, and the result in the log."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf_adapters.collectives import Collectives, to_first_rank
from tf_adapters.log import announce
from tf_adapters.report.build import build_report, early_end, result_line
from tf_adapters.report.schema import Report
from tf_adapters.training.run_view import LocalMeasurements, RunView

MetricSink = Callable[[Mapping[str, float]], None]
"""Takes a step's figures. One with a method ``due()`` is asked after each step whether it wants them."""

Advice = Callable[[Report], Sequence[str]]


def _no_advice(_: Report) -> Sequence[str]:
    return ()


class RunReporter:
    """An observer that writes the report on rank 0 of ``collectives``, the group of all ranks that train together.

    A process that ends without ``close`` still leaves a report: rank 0 writes what it knows by itself. ``metrics`` is
    called on this rank after each step with named figures (ratios in [0, 1], ms). It is code of the user or of the
    host. If it raises, training goes on, and the first error is logged. ``advice`` gives lines for the end of the log.
    """

    def __init__(
        self, collectives: Collectives, metrics: MetricSink | None = None, advice: Advice = _no_advice
    ) -> None:
        self._collectives, self._metrics = collectives, metrics
        self._said_metrics_failed = False
        self._writer = _Writer(writes=collectives.rank == 0, advice=advice)

    def step_ended(self, run: RunView) -> None:
        """Give the figures of a step that has ended to whoever asked for them."""
        self._writer.see(run)
        try:
            if self._metrics is not None and getattr(self._metrics, "due", lambda: True)():
                self._metrics(run.figures())
        except Exception as error:  # a rank that stopped here would leave the others waiting
            self._warn_of_metrics(error)

    def _warn_of_metrics(self, error: Exception) -> None:
        """Warn on this rank, once: a sink that fails once often fails in every step."""
        if self._said_metrics_failed:
            return
        self._said_metrics_failed = True
        text = " ".join(f"{type(error).__name__}: {error}".split())
        rank = self._collectives.rank
        announce(0, f"the metrics function failed on rank {rank}: {text}; training goes on", logging.WARNING)

    def report(self, run: RunView) -> None:
        """Write the report. Called on all ranks; none waits for rank 0. A full disk is no reason to stop freezing."""
        self._writer.see(run)
        self._write(run)

    def close(self, run: RunView) -> None:
        """The run is over: the last report. Called on all ranks."""
        self._write(run, last=True)
        self._writer.forget()

    def _write(self, run: RunView, last: bool = False) -> None:
        try:
            ranks = to_first_rank(self._collectives, run.local_measurements)
            if ranks is not None:
                self._writer.write(run, ranks, last)
        except Exception as error:
            self._writer.warn(error, self._collectives.rank)


_newest: dict[Path, _Writer] = {}  # by the report's path: whose run trains in this process, or has failed last


class _Writer:
    """Writes the reports of one run, on rank 0 (``writes``).

    The process keeps it until the run is closed or another one has its place: it holds no model and no group.
    """

    def __init__(self, writes: bool, advice: Advice) -> None:
        self.run: RunView | None = None
        self._writes, self._advice = writes, advice
        self._said_result = False
        self._said_speedup = False
        self._said_failure = False
        self._process = os.getpid()
        self._gathered: Sequence[LocalMeasurements] = ()

    def see(self, run: RunView) -> None:
        """Report ``run`` when the process ends. A run with the same path that failed before reports no more."""
        self.run, path = run, run.config.report_path
        before = _newest.get(path)
        if before is not self:
            if before is not None:
                before.forget()
            _newest[path] = self
            if self._writes:
                atexit.register(self.write_last)

    def forget(self) -> None:
        """Nothing is left to write when the process ends."""
        atexit.unregister(self.write_last)
        if self.run is not None and _newest.get(self.run.config.report_path) is self:
            del _newest[self.run.config.report_path]
        self.run = None

    def write(self, run: RunView, ranks: Sequence[LocalMeasurements], last: bool) -> None:
        self._gathered = ranks
        report, path = build_report(run, ranks), run.config.report_path
        report.write(path)
        self._said_failure = False
        known = report.measured.speedup is not None
        if last or not self._said_result or (known and not self._said_speedup):
            line = result_line(report, run.stable_steps_ms())
            if line is not None:
                self._said_result, self._said_speedup = True, known
                announce(0, line)
        if last:
            ended = early_end(report)
            for line in (*([ended] if ended else []), *self._advice(report)):
                announce(0, line)
            announce(0, f"the report is written; next: tf-adapters show {shlex.quote(str(path))}")

    def write_last(self) -> None:
        """The process ends without ``close``: other ranks may be gone, so their newest known figures stand.

        A process that was forked from it, for example to load data, ends sooner and has nothing to report. A run has
        nothing to report either if another one has trained here since, as when Megatron-Bridge restarts in the process.
        """
        run = self.run
        if run is None or os.getpid() != self._process:
            return
        try:
            self.write(run, [run.local_measurements(), *self._gathered[1:]], last=True)
        except Exception as error:
            self.warn(error, 0)

    def warn(self, error: Exception, rank: int) -> None:
        """Warn once until a report is written again: a disk that is full fails at every report."""
        if not self._said_failure:
            self._said_failure = True
            announce(rank, f"the report could not be written: {error}", logging.WARNING)
