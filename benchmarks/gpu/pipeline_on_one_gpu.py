"""A real pipeline on one GPU: four processes, each on its own quarter of the SMs, run torch.distributed.pipelining.

Layers of LLaMA 3.2 1B, 4 on each rank, 8 microbatches of 2,048 tokens, bf16, plain SGD. All ways train in the same
processes, block by block in rotation. A block is some steps in a row, so that steps overlap where nothing makes ranks
meet. Losses are compared to the bit. ``void_reasons`` returns the reasons for which the times mean nothing.

    python -m benchmarks.gpu.acceptance --part pipeline-one-gpu

Where MPS does not start, one process drives four streams instead (``four_streams.py``). ``several-gpus`` is the same
pipeline over NCCL, a GPU for each rank.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import four_streams
from benchmarks.gpu.one_gpu_group import BACKEND, OneGpuGroup
from benchmarks.gpu.parts import Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import LLAMA_1B, TINY, Size, Training, mean_square
from benchmarks.gpu.quarters import gathered, interference, seen_sms, take_quarter
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import clock_for

RANKS = 4
LLAMA = replace(LLAMA_1B, layers=4, rows=1)
SGD = functools.partial(torch.optim.SGD, lr=1e-4)
"""An optimizer without state: ten trainings fit in the memory of one GPU."""
EXACT = {"goal": "exact", "monitoring_precision": 0.02}


@dataclass(frozen=True)
class Way:
    """A schedule, our settings (None: the host alone), and whether ranks meet after each step."""

    schedule: str
    settings: dict[str, Any] | None = None
    meets: bool = False

    @property
    def exact(self) -> bool:
        """True if losses must be those of the host alone."""
        return self.settings is None or self.settings["goal"] == "exact"


ALONE, AGAIN = "1F1B", "1F1B, again"
WAYS = {
    ALONE: Way("1F1B"),
    AGAIN: Way("1F1B"),
    "1F1B, exact, ranks meet": Way("1F1B", EXACT, meets=True),
    "1F1B, exact, 2 microbatches more": Way("1F1B", EXACT | {"extra_microbatches": 2}),
    "1F1B, exact, 4 microbatches more": Way("1F1B", EXACT | {"extra_microbatches": 4}),
    "ZBV": Way("ZBV"),
    "ZBV, exact": Way("ZBV", EXACT),
    "interleaved 1F1B": Way("interleaved 1F1B"),
    "interleaved 1F1B, exact": Way("interleaved 1F1B", EXACT),
    "1F1B, paper": Way("1F1B", {"goal": "paper"}),
}


@dataclass(frozen=True)
class Lengths:
    """Numbers of steps, and of rounds through all ways."""

    warmup: int
    monitoring: int
    block: int
    rounds: int
    busy: int


FULL, SHORT = Lengths(2, 12, 8, 5, 6), Lengths(2, 6, 4, 2, 3)
"""At full size, 5 blocks of 8 steps. The first interval of each block is left out, so that 30 intervals count."""


@dataclass
class Facts:
    """Measurements of all ranks: SMs and interference by rank; by way, each rank's busy ms and ms without gaps."""

    sms: list[list[int]]
    interference: list[dict[str, float]]
    busy_ms: dict[str, list[float]] = field(default_factory=dict)
    queued_ms: dict[str, list[float]] = field(default_factory=dict)


MOST_TOGETHER, MOST_APART, MOST_GAPS = 1.05, 0.02, 0.03


def void_reasons(facts: Facts) -> list[str]:
    """Return why the times mean nothing; an empty list if they are valid."""
    reasons = []
    for rank, sms in enumerate(facts.sms):
        for other in range(rank):
            if set(sms) & set(facts.sms[other]):
                reasons.append(f"ranks {other} and {rank} share multiprocessors")
    slowest = max(ratios["products"] for ratios in facts.interference)
    if slowest > MOST_TOGETHER:
        reasons.append(f"matrix products take {slowest:.2f} times as long together as alone")
    for way, busy in facts.busy_ms.items():
        alone = facts.busy_ms[WAYS[way].schedule]
        apart = max(abs(ours / host - 1.0) for ours, host in zip(busy, alone, strict=True))
        if WAYS[way].exact and apart > MOST_APART:
            reasons.append(f"{way}: a rank computes {100 * apart:.1f}% longer or shorter than with the host alone")
    for way, queued in facts.queued_ms.items():
        gaps = max(busy / rank_ms - 1.0 for busy, rank_ms in zip(facts.busy_ms[way], queued, strict=True))
        if gaps > MOST_GAPS:
            reasons.append(f"{way}: launches leave gaps of {100 * gaps:.1f}%")
    return reasons


class Running:
    """The training of one way on this rank, its times from step to step, and its losses."""

    def __init__(self, options: Options, name: str, size: Size, lengths: Lengths) -> None:
        self.way, self.rounds, self.losses = WAYS[name], list[list[float]](), list[torch.Tensor]()
        self.training = Training(options, size, schedule=self.way.schedule, optimizer=SGD)
        self._clock = clock_for(options.target())
        if self.way.settings is not None:
            phases = {"warmup_steps": lengths.warmup, "monitoring_steps": lengths.monitoring, "progressive_steps": 0}
            folder = f"{options.folder}/one_gpu/{name}"
            self.training.attach(output_dir=folder, **phases, **self.way.settings)

    def block(self, steps: int) -> list[float]:
        """Run steps in a row. Return the ms from the beginning of each to that of the next, without the first."""
        self._wait_for_all()
        marks = []
        for _ in range(steps):
            marks.append(self._clock.mark())
            self.training.step()
            if self.training.loss is not None:
                self.losses.append(self.training.loss)
            if self.way.meets:
                self._wait_for_all()
        self._wait_for_all()
        between = [self._clock.elapsed_ms(before, after) or 0.0 for before, after in pairwise(marks)]
        return between[1:]

    def step_ms(self) -> list[float]:
        """Return the step's time in each round, of the rank where it is longest. Called on all ranks at once."""
        every = gathered([statistics.median(block) for block in self.rounds])
        return [max(of_round) for of_round in zip(*every, strict=True)]

    def busy_ms(self, steps: int) -> float:
        """Return this rank's median time of all actions of a step. The host alone is attached, and changes nothing."""
        alone = self.training.adapter is None
        if alone:
            self.training.attach(goal="exact", method="none", warmup_steps=10_000)
        self.block(steps)
        timer = self.training.adapter.controller.timer
        timer.drain(wait=True)
        phase = Phase.WARMUP if alone else Phase.STABLE
        traces = timer.traces(phase, self.training.size.microbatches)[-steps:]
        if alone:
            self.training.detach()
        return statistics.median(sum(each.end_ms - each.start_ms for each in trace.values()) for _, trace in traces)

    def queued_ms(self, options: Options) -> float:
        """Return the time of the same forwards and backwards, queued while the GPU is busy: launches leave no gap."""
        size = self.training.size
        whole = torch.randn((size.rows, size.context, size.width), device=self.training.device)
        given = whole.to(next(self.training.modules[0].parameters()).dtype)
        self._wait_for_all()
        times = []
        for _ in range(3):
            if options.cuda:
                torch.cuda._sleep(100_000_000)
            begin = self._clock.mark()
            for module in self.training.modules:
                mean_square(module(given), given).backward()
            end = self._clock.mark()
            self._clock.synchronize()
            times.append(self._clock.elapsed_ms(begin, end) or 0.0)
        self.training.optimizer.zero_grad()
        return size.microbatches * statistics.median(times)

    def _wait_for_all(self) -> None:
        self._clock.synchronize()
        dist.barrier()


def run(options: Options) -> Iterator[Check]:
    """Run four processes on one GPU, or one process with four streams if MPS did not start."""
    if options.no_mps:
        yield Check("one process drives four streams, not the host's engine", 1.0, note=options.no_mps)
        yield from four_streams.run(options)
        return
    deterministic(options)
    take_quarter(options)
    size = TINY if options.tiny else LLAMA
    group = dist.group.WORLD
    assert isinstance(group, OneGpuGroup)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        folder = Path(gathered(own)[0])  # rank 0's is used, and all remove theirs when all are done
        group.open(folder, slot_bytes=4 * size.rows * size.context * size.width)
        yield from compared(options, size, facts_of(options))
        dist.barrier()


def run_several(options: Options) -> Iterator[Check]:
    """Run with a GPU for each rank, so that no rank takes SMs or time of another."""
    deterministic(options)
    size = TINY if options.tiny else LLAMA_1B
    ranks = dist.get_world_size()
    facts = Facts([[rank] for rank in range(ranks)], [{"products": 1.0, "memory": 1.0}] * ranks)
    return compared(options, size, facts)


def facts_of(options: Options) -> Facts:
    """Measure the quarters themselves. Called on all ranks at once."""
    return Facts(gathered(seen_sms(options)), gathered(interference(options)))


def compared(options: Options, size: Size, facts: Facts) -> Iterator[Check]:
    """Run all ways in rotation. Called on all ranks at once."""
    lengths = SHORT if options.tiny else FULL
    running = {name: Running(options, name, size, lengths) for name in WAYS}
    for way in running.values():
        way.block(lengths.warmup + lengths.monitoring + 4)
    for number in range(lengths.rounds):
        for name in rotated(list(WAYS), number):
            running[name].rounds.append(running[name].block(lengths.block))
        steps = {name: way.step_ms() for name, way in running.items()}
        for name in WAYS:  # after each round: later figures replace earlier ones
            yield from checks_of(options, name, running[name], steps)
    losses = {name: losses_of(way) for name, way in running.items()}
    for name, way in WAYS.items():
        if way.exact:
            same = losses[name] == losses[way.schedule]
            yield Check(f"{name}: losses are the host's, to the bit", float(same), least=1)
    for name, trained in running.items():
        facts.busy_ms[name] = gathered(trained.busy_ms(lengths.busy))
        if trained.way.settings is None:
            facts.queued_ms[name] = gathered(trained.queued_ms(options))
    yield from verdict(options, facts)


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, beginning with another one in each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def deterministic(options: Options) -> None:
    """Make attention's backward add up in one order."""
    if options.cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def checks_of(options: Options, name: str, running: Running, steps: dict[str, list[float]]) -> Iterator[Check]:
    """Yield the step, measured and planned, and its speedup over 1F1B alone and over its own schedule alone."""
    own = statistics.median(steps[name])
    yield Check(f"{name}: step", own, "ms")
    if name != ALONE:
        yield Check(f"{name}: speed over 1F1B alone", speedup(steps, ALONE, name), "x")
    if running.way.settings is None:
        return
    if running.way.schedule != ALONE:
        yield Check(f"{name}: speed over its schedule alone", speedup(steps, running.way.schedule, name), "x")
    controller = running.training.adapter.controller
    forecast, plan = controller.forecast, controller.state.plan
    failed = plan is None or controller.state.failure is not None
    yield Check(f"{name}: runs a plan", float(not failed), least=1)
    if plan is None:
        return
    yield Check(f"{name}: planned step", forecast.planned_ms, "ms")
    limits = {"least": 0.97, "most": 1.03} if options.judged else {}
    yield Check(f"{name}: measured over planned", own / forecast.planned_ms, **limits)
    yield Check(f"{name}: mean freeze ratio", plan.mean_freeze_ratio)


def speedup(steps: dict[str, list[float]], alone: str, name: str) -> float:
    """Return the median over rounds of the host's step over the way's."""
    return statistics.median(host / ours for host, ours in zip(steps[alone], steps[name], strict=True))


def losses_of(running: Running) -> list[float]:
    """Return the losses of all steps, from the rank that has the last stage. Called on all ranks at once."""
    own = [float(loss) for loss in running.losses]
    return next(losses for losses in gathered(own) if losses)


def verdict(options: Options, facts: Facts) -> Iterator[Check]:
    """Say whether the times are valid, with the figures that decide it."""
    for kind in ("products", "memory"):
        most = max(ratios[kind] for ratios in facts.interference)
        yield Check(f"{kind}, together over alone", most, "x")
    reasons = void_reasons(facts)
    limit = 0 if options.judged else None
    yield Check("reasons why the times are void", len(reasons), most=limit, note=str(reasons or ""))
    for name, value in asdict(facts).items():
        if isinstance(value, dict):
            for way, ranks in value.items():
                yield Check(f"{way}: {name} of the busiest rank", max(ranks), "ms")


def table(checks: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return one row for each way: step, planned, speeds, losses."""
    values = {check["name"]: check["value"] for check in checks}
    rows = []
    for name, way in WAYS.items():
        if f"{name}: step" not in values:
            continue
        planned = values.get(f"{name}: planned step")
        same = values.get(f"{name}: losses are the host's, to the bit")
        rows.append(
            [
                name + ("" if way.settings is not None else " alone"),
                f"{values[f'{name}: step']:.1f}",
                "-" if planned is None else f"{planned:.1f}",
                f"{values.get(f'{name}: speed over 1F1B alone', 1.0):.3f}x",
                {1.0: "same bits", 0.0: "**other bits**"}.get(same, "freezes"),
            ]
        )
    return rows


HEADINGS = ("way", "step, ms", "planned, ms", "speed", "losses")


def several_missing(options: Options) -> str | None:
    """Return the reason why there are not several GPUs; None if there are."""
    if options.cuda and torch.cuda.is_available() and torch.cuda.device_count() < 2:
        return "one GPU only"
    return no_gpu(options)


def several_ranks(options: Options) -> int:
    return min(8, torch.cuda.device_count()) if options.cuda else 2


PART = Part(
    title="a real pipeline on one GPU: four processes, each on a quarter of the SMs",
    run=run,
    missing=no_gpu,
    ranks=lambda options: 1 if options.no_mps else RANKS,
    backend=BACKEND,
    minutes=6.0,
    shares=True,
)
SEVERAL = Part("the same pipeline over NCCL, a GPU for each rank", run_several, several_missing, several_ranks)
