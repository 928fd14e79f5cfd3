"""Backward time against the frozen share, in layers of LLaMA's size: a straight line."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from statistics import median

import numpy as np

from benchmarks.gpu.parts import PICTURES, Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import Training
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Kind
from tf_adapters.testing import force_plan

SHARES = tuple(tenth / 10 for tenth in range(10))


def run(options: Options) -> list[Check]:
    """Run steps at every share in turn, and fit a line through the medians."""
    times = backward_times(options)
    shares, ms = np.array(list(times)), np.array(list(times.values()))
    slope, start = np.polyfit(shares, ms, 1)
    away = ms - (start + slope * shares)
    r2 = 1 - float((away**2).sum() / ((ms - ms.mean()) ** 2).sum())
    if options.judged:
        picture(times, float(start), float(slope))
    limits = (5.0, 0.98) if options.judged else (None, None)
    return [
        Check("backward, nothing frozen", float(start), "ms"),
        Check("backward, everything frozen, as the line says", float(start + slope), "ms"),
        Check("farthest from the line", 100 * float(abs(away).max() / start), "% of nothing frozen", most=limits[0]),
        Check("R2 of the line", r2, least=limits[1]),
    ]


def backward_times(options: Options) -> dict[float, float]:
    """Return a backward's median ms, by the share of its weight-gradient work that was frozen (two digits)."""
    training = Training(options)
    controller = training.attach_planned(0.0).controller
    for _ in range(3):
        training.step()
    controller.timer.drain(wait=True)
    controller.timer.clear()
    for _ in range(1 if options.tiny else 6):
        for share in SHARES:
            force_plan(controller, share)
            training.step()
    controller.timer.drain(wait=True)
    found: dict[float, list[float]] = defaultdict(list)
    for action in controller.timer.actions(Phase.STABLE):
        if action.kind is Kind.BACKWARD:
            for sample in controller.timer.samples(Phase.STABLE, action):
                found[round(sample.share, 2)].append(sample.ms)
    return {share: median(found[share]) for share in sorted(found)}


def picture(times: dict[float, float], start: float, slope: float) -> None:
    """Draw times and line, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(times), list(times.values()), "o", label="measured")
    axes.plot([0, 1], [start, start + slope], label="line")
    axes.set(xlabel="frozen share of the weight-gradient work", ylabel="backward of a microbatch, ms", ylim=(0, None))
    axes.legend()
    figure.savefig(PICTURES / "gpu_backward_time.png", dpi=120, bbox_inches="tight")


PART = Part("backward time against the frozen share, layers of LLaMA's size", run, no_gpu, minutes=1.5)
