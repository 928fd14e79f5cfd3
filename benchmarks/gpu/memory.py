"""Allocator and peak memory over 120 steps in stable freezing, compared with the host alone."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.parts import Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import Training
from benchmarks.shared.measuring import resident

STEPS, TINY_STEPS, LOOKS = 120, 12, 6


def run(options: Options) -> list[Check]:
    """Run the host alone, then with half of each backward frozen."""
    alone, attached = (looks(options, ratio) for ratio in (None, 0.5))
    growth = 100 * (attached[-1]["reserved"] / attached[LOOKS // 2 - 1]["reserved"] - 1)
    peak = max(look["peak"] for look in attached) / max(look["peak"] for look in alone)
    judged = options.judged
    held = "reserved" if options.cuda else "resident"
    return [
        Check(f"{held}, host alone, at the end", alone[-1]["reserved"] / 2**20, "MiB"),
        Check(f"{held}, attached, at the end", attached[-1]["reserved"] / 2**20, "MiB"),
        Check(f"growth of what is {held} in the second half", growth, "%", most=1.0 if judged else None),
        Check("retries of the allocator", attached[-1]["retries"], most=0 if judged else None),
        Check("peak, attached over alone", peak, most=1.0 if judged else None),
    ]


def looks(options: Options, ratio: float | None) -> list[dict[str, float]]:
    """Return the allocator's figures at regular intervals; ``ratio`` None is the host alone."""
    training = Training(options)
    if ratio is not None:
        training.attach_planned(ratio)
    if options.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = []
    for number in range(1, (TINY_STEPS if options.tiny else STEPS) + 1):
        training.step()
        if number % ((TINY_STEPS if options.tiny else STEPS) // LOOKS) == 0:
            found.append(look(options))
    if training.adapter is not None:
        training.detach()
    del training
    gc.collect()
    return found


def look(options: Options) -> dict[str, float]:
    """Return bytes reserved, peak bytes allocated and retries so far; on a CPU the process's resident memory."""
    if not options.cuda:
        return {"reserved": resident("VmRSS"), "peak": resident("VmHWM"), "retries": 0}
    stats = torch.cuda.memory_stats()
    return {
        "reserved": stats["reserved_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


PART = Part("allocator and peak memory over 120 steps", run, no_gpu, minutes=2.5)
